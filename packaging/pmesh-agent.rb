# The formula of a Homebrew tap; `brew update-python-resources pmesh-agent` adds the dependencies and
# their hashes, and the release its homepage, URL and hash. Nobody has run it yet.
class PmeshAgent < Formula
  include Language::Python::Virtualenv

  desc "Turns the Macs and Linux boxes at home into one training cluster"
  license "Apache-2.0"

  depends_on "python@3.13"

  service do
    run [opt_bin/"pmesh", "up"]
    keep_alive successful_exit: false
    log_path var/"log/pmesh.log"
    error_log_path var/"log/pmesh.log"
  end

  def install
    virtualenv_install_with_resources
  end

  test do
    assert_match "pmesh #{version}", shell_output("#{bin}/pmesh version")
  end
end
