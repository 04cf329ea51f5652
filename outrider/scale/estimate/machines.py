"""Machines by name, with the figures of public datasheets. Arithmetic rates are dense, without sparsity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from outrider.errors import OutriderError, either
from outrider.scale.estimate.equations import Efficiency, Machine

PESSIMISTIC, MIDDLE, OPTIMISTIC = "pessimistic", "middle", "optimistic"
_MAX_FIGURE = 1e9  # limit of all figures, so that a typing error cannot overflow
NAMES = (PESSIMISTIC, MIDDLE, OPTIMISTIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Usual efficiencies on a kind of machine: pessimistic, middle and optimistic. See `Efficiency`."""

    bandwidth: tuple[float, ...]  # shares of the datasheet figure
    arithmetic: tuple[float, ...]  # shares of the datasheet figure
    exposed: tuple[float, ...]  # shares of the shorter time, of reading and arithmetic, that does not overlap
    round_ms: tuple[float, ...]
    layer_us: tuple[float, ...]
    draft_pass_us: tuple[float, ...]
    allreduce_us: tuple[float, ...]


GPU = Kind(
    bandwidth=(0.6, 0.75, 0.9),
    arithmetic=(0.4, 0.6, 0.8),
    exposed=(0.5, 0.25, 0.0),
    round_ms=(1.0, 0.4, 0.1),
    layer_us=(20.0, 10.0, 5.0),
    draft_pass_us=(1000.0, 400.0, 100.0),
    allreduce_us=(60.0, 40.0, 15.0),
)
CPU = Kind(
    bandwidth=(0.5, 0.7, 0.85),
    arithmetic=(0.6, 0.75, 0.9),
    exposed=(0.5, 0.25, 0.0),
    round_ms=(0.4, 0.15, 0.1),
    layer_us=(10.0, 5.0, 1.0),
    draft_pass_us=(500.0, 100.0, 20.0),
    allreduce_us=(60.0, 40.0, 15.0),
)


@dataclass(frozen=True, slots=True)
class Datasheet:
    """The figures of a datasheet. If it does not state arithmetic rates, `note` says how they were computed."""

    gigabytes_per_s: float
    bf16: float  # tera-operations/s
    int8: float  # tera-operations/s
    gigabytes: float | None  # memory; None: it depends on the configuration
    kind: Kind = GPU
    note: str = ""


_ZEN4 = "64 bf16 operations per cycle and core (AVX-512, twice as many in int8) at the base clock"
_APPLE = "the GPU's fp32 rate, because Apple publishes no rate for bf16 and int8"

SHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        "B200": Datasheet(8000, 2250, 4500, 180),
        "H200": Datasheet(4800, 989.4, 1978.9, 141),
        "H100": Datasheet(3350, 989.4, 1978.9, 80, note="SXM"),
        "H100 PCIe": Datasheet(2000, 756, 1513, 80),
        "A100": Datasheet(2039, 312, 624, 80, note="SXM, 80 GB"),
        "A100 40GB": Datasheet(1555, 312, 624, 40),
        "L40S": Datasheet(864, 362, 733, 48),
        "L4": Datasheet(300, 121, 242, 24),
        "MI300X": Datasheet(5300, 1307.4, 2614.9, 192),
        "RTX 5090": Datasheet(1792, 209.5, 838, 32, note="bf16 with fp32 accumulation"),
        "RTX 4090": Datasheet(1008, 165.2, 660.6, 24, note="bf16 with fp32 accumulation"),
        "RTX 3090": Datasheet(936, 71, 284, 24, note="bf16 with fp32 accumulation"),
        "M1 Max": Datasheet(400, 10.4, 10.4, 64, note=_APPLE),
        "M4 Max": Datasheet(546, 16.2, 16.2, 128, note=f"{_APPLE}: 40 cores, 256 operations per cycle, 1.58 GHz"),
        "EPYC 2 cores": Datasheet(
            57.6, 0.397, 0.794, None, CPU, "two of an EPYC 9554's cores behind one die's link, 32 bytes at 1.8 GHz"
        ),
        "EPYC 64 cores": Datasheet(
            460.8, 12.7, 25.4, None, CPU, f"EPYC 9554, 12 channels of DDR5-4800; {_ZEN4}, 3.1 GHz"
        ),
        "Xeon 64 cores": Datasheet(
            358.4,
            249,
            498,
            None,
            CPU,
            "Xeon 8592+, 8 channels of DDR5-5600; AMX, 2048 bf16 operations per cycle, 1.9 GHz",
        ),
        "Ryzen 16 cores": Datasheet(
            83.2, 4.6, 9.2, None, CPU, f"Ryzen 7950X, 2 channels of DDR5-5200; {_ZEN4}, 4.5 GHz"
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOverrides:
    """Figures that replace those of a datasheet. None: use the datasheet."""

    bandwidth: float | None = None  # GB/s
    flops: float | None = None  # tera-operations/s, for bf16 and int8
    memory: float | None = None  # GB
    devices: int = 1


def find_machine(name: str | None, overrides: MachineOverrides) -> tuple[Machine, Datasheet]:
    """Return a machine and the datasheet of one of its devices.

    Args:
        name: a name in `SHEETS`; None: `overrides` must state the bandwidth and the arithmetic rate.
        overrides: figures of the user.

    Raises:
        OutriderError: the name is unknown, or a figure is not above 0.
    """
    devices = overrides.devices
    figures = {
        "bandwidth": overrides.bandwidth,
        "flops": overrides.flops,
        "memory": overrides.memory,
        "devices": devices,
    }
    for option, value in figures.items():
        if value is not None and not 0 < value <= _MAX_FIGURE:
            raise OutriderError(f"{option} is {value}; use a number above 0 and up to {_MAX_FIGURE:g}")
    title, sheet = _find_sheet(name, overrides)
    sheet = replace(
        sheet,
        gigabytes_per_s=overrides.bandwidth or sheet.gigabytes_per_s,
        bf16=overrides.flops or sheet.bf16,
        int8=overrides.flops or sheet.int8,
        gigabytes=overrides.memory or sheet.gigabytes,
    )
    machine = Machine(
        name=f"{devices} x {title}" if devices > 1 else title,
        bandwidth=devices * sheet.gigabytes_per_s * 1e9,
        bf16=devices * sheet.bf16 * 1e12,
        int8=devices * sheet.int8 * 1e12,
        memory=None if sheet.gigabytes is None else devices * sheet.gigabytes * 1e9,
        devices=devices,
    )
    return machine, sheet


def _find_sheet(name: str | None, overrides: MachineOverrides) -> tuple[str, Datasheet]:
    if name is None:
        if overrides.bandwidth is None or overrides.flops is None:
            raise OutriderError(
                "no machine is named; use --machine with one of "
                f"{', '.join(SHEETS)}, or give --bandwidth in GB/s and --flops in TFLOP/s"
            )
        sheet = Datasheet(overrides.bandwidth, overrides.flops, overrides.flops, overrides.memory)
        return "a machine of your own", sheet
    for title, sheet in SHEETS.items():
        if _normalize(title) == _normalize(name):
            return title, sheet
    raise OutriderError(f"machine {name!r} is unknown; use {either(SHEETS)}, or give --bandwidth and --flops")


def efficiencies(kind: Kind, given: Mapping[str, Sequence[float]]) -> tuple[Efficiency, ...]:
    """Return the pessimistic, middle and optimistic efficiency on a kind of machine.

    Args:
        kind: the usual figures.
        given: figures of the user by field of `Kind`: one for all cases, or one for each. They replace those of `kind`.

    Raises:
        OutriderError: there are neither one nor three figures, or a figure is out of range.
    """
    figures = {name: _three(name, values) for name, values in given.items() if values}
    for name in ("bandwidth", "arithmetic"):
        if not all(0 < share <= 1 for share in figures.get(name, ())):
            raise OutriderError(f"{name} shares are {given[name]}; use shares above 0 and up to 1, such as 0.75")
    if not all(0 <= share <= 1 for share in figures.get("exposed", ())):
        raise OutriderError(f"exposed shares are {given['exposed']}; use shares from 0 to 1")
    for values in figures.values():
        for value in values:
            if not 0 <= value <= _MAX_FIGURE:
                raise OutriderError(f"a time is {value}; use numbers from 0 to {_MAX_FIGURE:g}")
    kind = replace(kind, **figures)
    return tuple(
        Efficiency(
            name=name,
            bandwidth=kind.bandwidth[i],
            arithmetic=kind.arithmetic[i],
            exposed=kind.exposed[i],
            round_seconds=kind.round_ms[i] / 1e3,
            layer_seconds=kind.layer_us[i] / 1e6,
            draft_pass_seconds=kind.draft_pass_us[i] / 1e6,
            allreduce_seconds=kind.allreduce_us[i] / 1e6,
        )
        for i, name in enumerate(NAMES)
    )


def _three(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Return one figure per case."""
    if len(values) not in (1, 3):
        raise OutriderError(
            f"{len(values)} figures are given for {name.replace('_', ' in ')}; give one, or three:"
            " pessimistic, middle, optimistic"
        )
    return tuple(values) * (3 // len(values))


def _normalize(name: str) -> str:
    """Return letters and digits in lower case, so that "rtx-4090" equals "RTX 4090"."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())
