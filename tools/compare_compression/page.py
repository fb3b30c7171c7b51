"""docs/explanation/compression-training.md, made of what was measured."""

from collections.abc import Iterator, Sequence

from tools.compare_compression.report import table_of, verdicts
from tools.compare_compression.results import Measured

_FRAME = """\
# What compression does to a training, measured

<!-- Written by `python -m tools.compare_compression`: change the tool, or measure again. -->

Compression changes the gradients. This page says what that does to the loss at the end of a
training: for each scheme with error feedback, which is how `mesh.average_gradients` uses them
(but for BF16 and FP16, which have it only if asked for), and without. Every number is measured by
`tools/compare_compression`, by the command at the end of this page; the results lie in
`docs/explanation/compression-training/`, and a test compares this page with them.

**{verdict}** The bar: with feedback, the mean of the final losses is at most 1 % above the
uncompressed one.

![losses on the way, and final losses beside the uncompressed one](compression-training/losses.svg)

## How it is measured

- **Four ranks**, as threads of one process (`pmesh.testing.SimulatedMesh`), which make the calls
  that a user's script makes: `mesh.average_gradients(gradients, weight=…, compression=…)`. The
  kernels, the order of the hops and the feedback are those of a real mesh, bit for bit; there is no
  network, so nothing here is about time. The gradients are MLX's. After each training the hash of
  the weights is the same on all ranks, or the tool stops.
- **Three seeds.** A seed says what the first weights are and what each batch holds, the same for
  all schemes: so one loss is divided by another of the same seed, and *worst seed* is the largest
  of these ratios. *Ratio* is that of the means.
- **The final loss** is the mean cross-entropy, in nats, of 8,192 samples drawn as the training's
  are, the same for all.
- **Losses that level off above zero.** A net that learns its samples by heart ends near zero, and
  the ratio of two such numbers says nothing. So each pixel of scikit-learn's digits (from 0 to 1)
  gets fresh Gaussian noise of deviation 0.5 in each batch, and the language model, that of
  Bengio et al. 2003 over eight characters, reads less text than there is: some files of the Python
  standard library, named in the tool.
- **Plain SGD**, whose rate rises in the first twentieth of the steps and then falls to zero in a
  straight line, the same for all schemes. Rates and numbers of steps were chosen so that the
  uncompressed loss has levelled off and a few hundred steps more change little: what feedback holds
  back comes later, TopK's smaller values by dozens of steps, and a training that is cut off while
  the loss still falls would measure that delay. They were chosen once for all schemes, by the
  uncompressed one, RandomK and TopK with the first seed; no option was tuned per scheme.
- **Options are the defaults**: `PowerSGD` begins after 10 uncompressed calls. The row *warmed up*
  is not judged. It sends 25, 6.25, 1.6 and then 1 % over the first tenth of the steps, as Deep
  Gradient Compression does (Lin et al. 2018): `compression=TopK(ratio=...)` by the step.

## What is left to say

- **No momentum.** Feedback delays gradients, and momentum makes each of them last ten times longer:
  with 0.9 the sparse schemes bear only a lower rate. While these trainings were being set up,
  RandomK at 10 % diverged on the perceptron at a rate of 0.1 with a momentum of 0.9, where
  uncompressed training did well. Begin with a rate a few times lower there, or without momentum.
- **Small models.** Their gradients are not those of large ones; that schemes do as well there is
  what the papers say, not what was measured here.

{tables}
## Repeat it

After `make venv`, with one thread for the products (`OMP_NUM_THREADS=1`):

{commands}

The page and the picture, from the results:

    python -m tools.compare_compression --read docs/explanation/compression-training/*.json \\
        --page docs/explanation/compression-training.md \\
        --plot docs/explanation/compression-training/losses.svg
"""


def render(measured: Sequence[Measured]) -> str:
    """The whole page."""
    return _FRAME.format(
        verdict=verdicts(measured),
        tables="\n".join(_section(each) for each in measured),
        commands="\n".join(_commands(measured)),
    )


def _section(measured: Measured) -> str:
    said = (
        f"{measured.weights:,} weights, {measured.ranks} ranks of {measured.batch} samples each, "
        f"{measured.steps} steps, a rate of {measured.rate:g}."
    )
    title = measured.what[0].upper() + measured.what[1:]
    return "\n".join([f"## {title}", "", said, "", *table_of(measured), ""])


def _commands(measured: Sequence[Measured]) -> Iterator[str]:
    for m in measured:
        yield (f"    {m.command}   # {m.took_cpu_s:,.0f} s of CPU time, at {m.commit}, {m.machine}")
