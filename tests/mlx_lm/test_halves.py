"""What the two halves of a step cost in memory."""

from typing import Any

from mlx.optimizers import Adam

from pmesh.mlx_lm import halves
from pmesh.mlx_lm.halves import compile_update, evaluate_in_groups
from pmesh.mlx_lm.libraries import mx, trees
from tests.worlds.faults import Faults


def test_an_update_holds_old_and_new_arrays_of_one_group_at_a_time(faults: Faults) -> None:
    array_bytes, arrays = 1 << 20, 24
    faults.limit(halves, "GROUP_BYTES", 2 * array_bytes)
    parameters: Any = {f"x{i}": mx.zeros(array_bytes // 4) for i in range(arrays)}
    optimizer = Adam(1e-3)
    optimizer.init(parameters)
    mx.eval(parameters, optimizer.state)
    update = compile_update(optimizer)
    for _ in range(2):
        grads = trees.tree_map(mx.ones_like, parameters)
        mx.eval(grads)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        parameters, optimizer.state = update(parameters, optimizer.state, grads)
        del grads
        evaluate_in_groups(parameters, optimizer.state)

    assert mx.get_peak_memory() - before <= 8 * array_bytes  # at once: 72
    assert mx.get_active_memory() <= before - (arrays - 1) * array_bytes  # without the gradients
    assert parameters["x0"][0].item() < 0
