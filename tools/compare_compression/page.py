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
  of these ratios. *Ratio* is that of the means. Without feedback, which is not judged, the first
  seed is trained, and its ratio is to that seed's uncompressed loss.
- **The final loss** is the mean cross-entropy, in nats, of 8,192 samples drawn as the training's
  are, the same for all.
- **Losses that level off above zero.** A net that learns its samples by heart ends near zero, and
  the ratio of two such numbers says nothing. So each pixel of scikit-learn's digits (from 0 to 1)
  gets fresh Gaussian noise of deviation 0.5 in each batch, and the language model, that of
  Bengio et al. 2003 over eight characters, reads less text than there is: some files of the Python
  standard library, named in the tool.
- **Plain SGD**, whose rate rises in the first twentieth of the steps and then falls to zero in a
  straight line. Rates and numbers of steps are the same for all schemes. They were tried out with
  the first seed, uncompressed, with RandomK, TopK and some others, with an eye on the ratios: so
  the first seed is no fresh one, the other two are. No option was tuned per scheme.
- **Options are the defaults**: `PowerSGD` begins after 10 uncompressed calls. The row *warmed up*
  is not judged. It sends 25, 6.25, 1.6 and then 1 % over the first tenth of the steps, as Deep
  Gradient Compression does (Lin et al. 2018): `compression=TopK(ratio=...)` by the step.

## What is left to say

- **These trainings are short**, to fit into minutes of one core: their losses still fall when the
  steps run out. Feedback holds gradients back, RandomK at 10 % by ten steps in the mean, TopK its
  smaller values by more, and what comes late counts here.
- **What was tried out and is not in the results**, each with the first seed alone: on a smaller
  convolutional net, of 5,682 weights, TopK at 1 % (57 values of each rank) ended 1.2 % above
  uncompressed after 800 steps at a rate of 0.2. On the one below, RandomK at 10 % ended 1.1 % above
  after 900 steps: a longer training alone does not close such a gap.
- **No momentum.** It makes each gradient last longer, and adds to the delay. While these trainings
  were being set up, RandomK with feedback and a momentum of 0.9 diverged on the perceptron at a
  rate where uncompressed training did well; that is no part of the results. Where a sparse scheme
  makes a training unstable, begin with a lower rate.
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
