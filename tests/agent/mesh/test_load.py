"""How busy a machine says that it is."""

from pmesh.agent.mesh.load import MEASURE_EVERY_S, LoadMeter, MachineLoad


def test_a_load_is_measured_once_in_two_seconds_and_the_first_has_nothing_to_compare_with() -> None:
    shares = iter([0.0, 41.6, 250.0])
    meter = LoadMeter(lambda: next(shares), lambda: 63.2)
    assert meter.load == MachineLoad(-1, -1)
    assert meter.measure(10.0) == MachineLoad(-1, 63)
    assert meter.measure(10.0 + MEASURE_EVERY_S / 2) == MachineLoad(-1, 63)
    assert meter.measure(10.0 + MEASURE_EVERY_S) == MachineLoad(42, 63)
    assert meter.measure(99.0) == MachineLoad(100, 63)


def test_a_machine_that_has_no_descriptor_left_says_what_it_said_before() -> None:
    shares = [12.0, 20.0]

    def percent() -> float:
        if not shares:
            raise OSError(24, "Too many open files")
        return shares.pop(0)

    meter = LoadMeter(percent, lambda: 50.0)
    meter.measure(0.0)
    assert meter.measure(5.0) == meter.measure(10.0) == MachineLoad(20, 50)


def test_this_machine_has_a_load() -> None:
    meter = LoadMeter()
    meter.measure(0.0)
    load = meter.measure(5.0)
    assert 0 <= load.cpu_percent <= 100
    assert 0 < load.memory_percent <= 100
