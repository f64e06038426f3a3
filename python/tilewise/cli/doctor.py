"""`tilewise doctor`: the kernels that run on this machine, why, and whether they are correct."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from pathlib import Path
from typing import Any

from tilewise import _abi
from tilewise._capabilities import cuda_code
from tilewise._library import c_library
from tilewise.cli import gpu, prove, provenance, system, tables
from tilewise.cli.progress import Progress

EXAMPLES = """examples:
  tilewise doctor                  everything, with the self-test
  tilewise doctor --no-test        facts only
  tilewise doctor --isa avx2       self-test of one instruction set
  tilewise doctor --isa gpu0       self-test of one GPU
  tilewise doctor --provenance     which kernels were run on which machine, which only compiled
  tilewise doctor --prove          test kernels that are off until a GPU has proved them
  tilewise doctor --json           the same as JSON

The self-test compares forward and gradients with an attention in double precision, for every
instruction set and GPU of this machine (on a GPU it needs PyTorch), every dtype and a set of
options. --prove compares a family of kernels that has run on no GPU with exact results and with the
family that serves without it, in a child process that it stops after ten minutes. From then on
Tilewise uses the family on this GPU where it is right and faster. Exit status: 0 success, 1 a check
failed or TILEWISE_CPU leaves no kernel that can run, 2 the library cannot be loaded.
"""

# Head dimensions at which the choice of the kernel might change.
HEAD_DIMS = (1, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576)
DTYPES = ("float32", "bfloat16", "float16")


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="which kernels run here and why, with a self-test",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--no-test", action="store_true", help="skip the self-test")
    add("--isa", metavar="NAME", help="test only this instruction set, or this GPU (gpu0)")
    add("--provenance", action="store_true", help="show the machines that kernels were run on")
    add("--prove", action="store_true", help="test kernels that are off until a GPU proves them")
    add("--json", action="store_true", help="print JSON and nothing else")
    add("--record", type=Path, metavar="FILE", help="add the passed checks to a provenance file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the requested facts and runs the self-test. Returns the exit status.

    Raises:
        ValueError: --isa names an instruction set that cannot be tested here; --isa or --record is
            given although the self-test does not run; --record names a file that records cannot be
            added to; or the environment turns off what --prove tests.
        ImportError: the library or NumPy is missing.
        OSError: the record of --prove cannot be written.
    """
    for flag in ("--provenance", "--prove", "--no-test"):
        for name in ("isa", "record"):
            given = getattr(options, name)
            if given and getattr(options, flag[2:].replace("-", "_")):
                raise ValueError(
                    f"--{name} is '{given}', but is allowed only with the self-test, which {flag} "
                    "leaves out"
                )
    if options.prove:
        return prove.run(options.json)
    if options.provenance:
        return show_provenance(options.json)
    sets = system.instruction_sets()
    isas = [name for name, available in sets if available]
    gpus = [f"gpu{device['index']}" for device in gpu.gpus()[0]]
    if options.isa:
        if options.isa not in isas + gpus:
            raise ValueError(
                f"--isa is {options.isa!r}, but this machine and build have {isas + gpus}"
            )
        isas = [options.isa]
    elif system.cuda_device():
        isas += gpus
    if options.record:
        provenance.check(options.record)  # fail before the self-test, not after it
    facts = collect(sets)
    if not options.json:
        show(facts)
    checks = [] if options.no_test else self_test(isas, quiet=options.json)
    passed = facts["in_use"] is not None and all(check.passed for check in checks)
    if options.json:
        facts["self_test"] = [check.to_json() for check in checks]
        facts["passed"] = passed
        print(json.dumps(facts, indent=1))
    elif checks:
        show_checks(checks, [name for name, available in sets if not available])
    if options.record:
        count = provenance.record(options.record, checks)
        if not options.json:
            print(f"{count} records of this machine in {options.record}")
    return 0 if passed else 1


def collect(sets: list[tuple[str, bool]]) -> dict[str, Any]:
    """The facts about machine, build and planner."""
    gpus, no_gpu = gpu.gpus()
    planned = planned_kernels()
    usable = any(row["forward"] != "-" for row in planned)
    return {
        "device": {
            "cpu": system.cpu_name(),
            "cores": system.cores(),
            "threads": c_library().tilewise_cpu_threads(),
            "cuda": system.cuda_device(),
            "gpus": gpus,
            "no_gpu": no_gpu,
        },
        "cuda": gpu.cuda_versions(),
        "cuda_code": cuda_code(),
        "library": str(system.library_path()),
        "versions": system.versions(),
        "instruction_sets": [{"name": n, "available": a} for n, a in sets],
        "in_use": system.current_isa() if usable else None,
        "forced_by": os.environ.get("TILEWISE_CPU"),
        "kernels": system.kernels(),
        "serves": planned,
        "proofs": prove.states(),
        "gpu_serves": {device["index"]: gpu.planned_kernels(device["index"]) for device in gpus},
    }


def planned_kernels() -> list[dict[str, Any]]:
    """The kernel that the planner chooses here, by dtype and range of head dimensions."""
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            forward, backward = (plan(dtype, head_dim, p) for p in (_abi.FORWARD, _abi.BACKWARD))
            same = {
                "dtype": dtype,
                "forward": forward[0],
                "backward": backward[0],
                "why": forward[1] if forward[1] == backward[1] else f"{forward[1]}; {backward[1]}",
            }
            if rows and all(rows[-1][key] == value for key, value in same.items()):
                rows[-1]["to_head_dim"] = head_dim
            else:
                first = rows[-1]["to_head_dim"] + 1 if rows and head_dim != HEAD_DIMS[0] else 1
                rows.append({**same, "from_head_dim": first, "to_head_dim": head_dim})
    return rows


def plan(dtype: str, head_dim: int, which: int) -> tuple[str, str]:
    """The kernel for a problem without options, and the reason; ("-", error) without a kernel."""
    library = c_library()
    a = _abi.sized(_abi.Attention)
    a.device, a.dtype = _abi.CPU, _abi.DTYPES[dtype]
    a.batch, a.seqlen_q, a.seqlen_k = 1, 1024, 1024
    a.heads_q = a.heads_kv = 8
    a.head_dim, a.scale = head_dim, 1.0
    a.window_left = a.window_right = -1
    row = 8 * head_dim
    a.q = a.k = a.v = a.out = _abi.Tensor(None, 1024 * row, row, head_dim)
    a.lse_stride_batch, a.lse_stride_head = 8 * 1024, 1024
    g = _abi.sized(_abi.Gradients)
    g.dout = g.dq = g.dk = g.dv = a.q
    info = _abi.sized(_abi.PlanInfo)
    gradients = ctypes.byref(g) if which == _abi.BACKWARD else None
    status = library.tilewise_plan(ctypes.byref(a), gradients, which, ctypes.byref(info))
    if status != _abi.OK:
        return "-", library.tilewise_last_error().decode()
    return info.kernel.decode(), info.why.decode()


def show(facts: dict[str, Any]) -> None:
    """Prints the facts that collect() returned."""
    device = facts["device"]
    print(
        f"device            {device['cpu']}, {device['cores']} cores, {device['threads']} threads"
    )
    for text in gpu_lines(facts):
        print(text)
    for name in ("available", "missing here"):
        wanted = name == "available"
        names = [s["name"] for s in facts["instruction_sets"] if s["available"] == wanted]
        label = "instruction sets  " if wanted else " " * 18
        print(f"{label}{name}: {', '.join(names) or 'none'}")
    forced = f" (TILEWISE_CPU={facts['forced_by']})" if facts["forced_by"] else ""
    in_use = (
        f"{facts['in_use']}{forced}" if facts["in_use"] else f"none, {facts['serves'][0]['why']}"
    )
    print(f"{'':18}in use: {in_use}")
    versions = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in facts["versions"].items()
    )
    print(f"versions          {versions}")
    print(f"library           {facts['library']}")
    print("\nWhich kernel runs on the CPU:")
    lines = [
        [
            r["dtype"],
            f"{r['from_head_dim']}-{r['to_head_dim']}",
            r["forward"],
            r["backward"],
            r["why"],
        ]
        for r in facts["serves"]
    ]
    head = ["dtype", "head dim", "forward", "backward", "why"]
    tables.show(head, lines, left=range(len(head)))
    for index, rows in facts["gpu_serves"].items():
        show_gpu(index, rows)


def gpu_lines(facts: dict[str, Any]) -> list[str]:
    """Lines that describe the GPUs and the CUDA code in the library."""
    lines = []
    for device in facts["device"]["gpus"]:
        memory = f", {device['memory_bytes'] / 1e9:.0f} GB" if device["memory_bytes"] else ""
        label = f"GPU {device['index']}"
        lines.append(
            f"{label:18}{device['name']}: sm_{device['sm']}, {device['multiprocessors']} "
            f"SMs, {device['shared_bytes'] // 1024} KB of shared memory per block, "
            f"{device['l2_bytes'] / 2**20:.0f} MB L2{memory}"
        )
        forced = os.environ.get("TILEWISE_FORCE_ARCH")
        tiles = f"tiles of {gpu.table_name(device['table'])}"
        tiles += " (TILEWISE_FORCE_ARCH)" if forced else ""
        code = [
            f"{name}: {'yes' if device[key] else 'NOT in this build'}"
            for name, key in (("tensor cores", "tensor_cores"), ("fp32 units", "plain_cores"))
        ]
        lines.append(f"{'':18}{tiles}; kernels for {', for '.join(code)}")
        if not device["tensor_cores"] and not device["plain_cores"]:
            known = sorted({row["sm"] for row in facts["cuda_code"]})
            lines.append(
                f"{'':18}NOT USED: this library has no code for sm_{device['sm']}, only for "
                f"{', '.join(f'sm_{sm}' for sm in known)}"
            )
    if not lines:
        lines.append(f"{'GPU':18}{facts['device']['no_gpu']}")
    lines += [f"{'':18}{row['state']}" for row in facts["proofs"]]
    lines.append(f"{'CUDA':18}{cuda_text(facts['cuda'])}")
    emulated = facts["device"]["gpus"] and not facts["cuda_code"]
    text = "for the emulator of the tests" if emulated else code_text(facts["cuda_code"])
    lines.append(f"{'CUDA code':18}{text}")
    return lines


def cuda_text(versions: dict[str, str | None]) -> str:
    """The versions of runtime and driver in words."""
    if not versions["runtime"]:
        return "no runtime in this build"
    driver = "no driver"
    if versions["driver"]:
        release = f"{versions['driver_release']}, " if versions["driver_release"] else ""
        driver = f"driver {release}up to CUDA {versions['driver']}"
    return f"runtime {versions['runtime']}; {driver}"


def code_text(code: list[dict[str, Any]]) -> str:
    """The CUDA code of this build in words, by tile table."""
    parts = []
    for table in dict.fromkeys(row["table"] for row in code):
        entries = [row for row in code if row["table"] == table]
        lists = [
            f"{kind} {' '.join(str(r['sm']) for r in entries if r['ptx'] == ptx)}"
            for kind, ptx in (("SASS", False), ("PTX", True))
            if any(r["ptx"] == ptx for r in entries)
        ]
        name = f"tiles of {gpu.table_name(table)}" if table else "without tensor cores"
        parts.append(f"{name}: {', '.join(lists)}")
    return "; ".join(parts) or "none in this build"


def show_gpu(index: int, rows: list[dict[str, Any]]) -> None:
    """Prints the kernels that the planner chooses on a GPU."""
    print(f"\nWhich kernel runs on GPU {index} (tiles are query rows x keys):")
    lines = []
    for row in rows:
        cells = []
        for which in ("forward", "backward"):
            p = row[which]
            splits = f", {p['splits']} splits" if p["splits"] > 1 else ""
            forms = [f", {f} form" for f in ("general", "paged") if f"{f} form" in p["why"]]
            form = "".join(forms)
            cells.append("-" if p["kernel"] == "-" else f"{p['kernel']} {p['tile']}{splits}{form}")
        dims = row["head_dims"]
        span = f"{dims[0]}-{dims[-1]}" if len(dims) > 1 else str(dims[0])
        why = row["forward"]["why"].partition(": ")[2] or row["forward"]["why"]
        lines.append([row["dtype"], row["case"], span, *cells, why])
    head = ["dtype", "problem", "head dims", "forward", "backward", "why"]
    tables.show(head, lines, left=range(len(head)))


def self_test(isas: list[str], *, quiet: bool) -> list[Any]:
    """Runs the checks and shows a progress bar.

    Raises:
        ImportError: NumPy is missing.
    """
    try:
        from tilewise.cli import selftest
    except ImportError as error:
        if error.name != "numpy":
            raise
        raise ImportError("the self-test needs NumPy: install it, or use --no-test") from None
    if quiet:
        return list(selftest.run(isas))
    print()
    checks = []
    with Progress(len(selftest.plan_of_checks(isas)), "self-test") as bar:
        for check in selftest.run(isas):
            checks.append(check)
            bar.update(isa=check.isa, dtype=check.dtype)
    return checks


def show_checks(checks: list[Any], not_run: list[str]) -> None:
    """Prints the largest errors per instruction set and dtype, then every failure."""
    names = ("out", "lse", "dq", "dk", "dv")
    lines = []
    for isa, dtype in dict.fromkeys((c.isa, c.dtype) for c in checks):
        group = [c for c in checks if (c.isa, c.dtype) == (isa, dtype)]
        worst = [max((c.errors.get(n, 0.0) for c in group), default=0.0) for n in names]
        passed = sum(c.passed for c in group)
        verdict = "pass" if passed == len(group) else "FAIL"
        lines.append([isa, dtype, f"{passed}/{len(group)}", *(f"{w:.1e}" for w in worst), verdict])
    print("\nSelf-test against double precision, largest error relative to the largest magnitude:")
    head = ["instruction set", "dtype", "passed", *names, ""]
    tables.show(head, lines, left=(0, 1, 8))
    for name in not_run:
        print(f"{name}: not run, because this machine lacks it")
    for check in checks:
        if not check.passed:
            print(f"FAILED {check.isa} {check.dtype} {check.setting}: {check.failure}")


def show_provenance(as_json: bool) -> int:
    """Prints the machines on which each kernel family of this build has been run."""
    rows = provenance.status(provenance.load())
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    lines = []
    for row in rows:
        if not row["runs"]:
            lines.append([row["kernel"], row["state"], "", "", ""])
        for r in row["runs"]:
            passed = f"{r['checks']} checks passed"
            lines.append([row["kernel"], row["state"], r["machine"], r["date"], passed])
    head = ["kernel", "state", "machine", "date", "proof"]
    tables.show(head, lines, left=range(len(head)))
    print(f"CUDA code in this library: {code_text(cuda_code())}")
    return 0
