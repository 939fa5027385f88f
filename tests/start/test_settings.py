"""All settings: one table of variables, shown in the docs, and how init() reads them."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import horo_lite as hvd
from horo_lite.settings import FORM, VARIABLES, Settings, unknown_variables
from horo_lite.transports.peers import fits

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for variable in VARIABLES for name in variable.names]


def test_the_docs_have_the_table_of_variables() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    _, _, after = page.partition("| variable | argument | meaning |")
    rows = after.partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert shown == [
        [", ".join(f"`{name}`" for name in v.names), v.argument, v.meaning, v.default]
        for v in VARIABLES
    ]


def test_every_variable_that_is_read_is_in_the_table() -> None:
    sources = [*(ROOT / "horo_lite").rglob("*.py"), ROOT / "setup.py"]
    text = "".join(path.read_text() for path in sources)
    read = set(re.findall(r"\bHORO_LITE_[A-Z][A-Z_]*[A-Z]\b", text))
    # Variables of the Makefile, for wheels; and of tests.
    unlisted = {"HORO_LITE_CUDA_WHEELS", "HORO_LITE_WHEEL_CPU", "HORO_LITE_TEST_GPUS"}
    assert read - unlisted == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_every_argument_of_init_is_a_setting_with_a_variable() -> None:
    arguments = [name for name in inspect.signature(hvd.init).parameters if name != "comm"]
    settings = [field.name for field in fields(Settings)]
    assert settings == [*arguments, "timeline", "problem"] == list(FORM)
    for name in arguments:
        (variable,) = (v for v in VARIABLES if f"HORO_LITE_{name.upper()}" in v.names)
        assert re.search(rf"init\(.*\b{name}=", variable.argument)
        default = getattr(Settings(), name)
        if isinstance(default, float):
            assert float(variable.default) == default


def test_an_argument_takes_precedence_over_its_variable() -> None:
    environ = {
        "HORO_LITE_DEVICE": "cuda",
        "HORO_LITE_THREADS": "3",
        "HORO_LITE_TEST_HOSTS": "2, 1",
        "HORO_LITE_STALL_WARN_S": "",
        "HORO_LITE_RANK": "1",
    }
    settings = Settings.read({"device": "cpu", "stall_abort_s": 5}, environ)
    expected = Settings(
        rank=1, device="cpu", threads=3, test_hosts=(2, 1), stall_warn_s=30.0, stall_abort_s=5.0
    )
    assert settings == expected
    assert all(fits(getattr(settings, name), form) for name, form in FORM.items())
    assert settings.difference(Settings.read({"device": "cuda"}, environ)) == "device"
    assert (
        settings.difference(Settings.read({"stall_abort_s": "5", "device": "cpu"}, environ)) == ""
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("threads", "0", "threads must be a positive number, not '0'"),
        ("binding", "loose", "binding must be 'auto' or 'keep', not 'loose'"),
        ("test_hosts", "2,x", "test_hosts must be positive sizes as in '2,1', not '2,x'"),
        ("device", "tpu", "device must be 'cpu', 'cuda' or like 'cuda:1', not 'tpu'"),
        ("stall_warn_s", "-1", "stall_warn_s must be a number of seconds, or 0 for never"),
        ("start_timeout_s", "soon", "start_timeout_s must be a number of seconds"),
    ],
)
def test_what_makes_no_sense_is_kept_until_every_rank_can_raise_it(
    name: str, value: str, problem: str
) -> None:
    for settings in (
        Settings.read({name: value}, {}),
        Settings.read({}, {f"HORO_LITE_{name.upper()}": value}),
    ):
        assert problem in settings.problem
        assert settings.difference(Settings()) == ""
    assert settings.problem.startswith(f"HORO_LITE_{name.upper()}={value}: ")
    with pytest.raises(ValueError, match=re.escape("rank must be a number, and at least 0")):
        Settings.read({"rank": "first", name: value}, {})


def test_variables_that_do_not_exist_are_named() -> None:
    environ = dict.fromkeys([*NAMES, "HORO_LITE_TEST_GPUS", "PATH"], "1")
    assert unknown_variables(environ) == []
    mistaken = {"HORO_LITE_STALL_WARN": "3", "HORO_LITE_LOG_LEVEL": "debug"}
    assert unknown_variables(environ | mistaken) == [
        "HORO_LITE_LOG_LEVEL is set, but there is no such variable",
        "HORO_LITE_STALL_WARN is set, but there is no such variable; "
        "did you mean HORO_LITE_STALL_WARN_S?",
    ]


def test_init_warns_of_a_variable_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORO_LITE_BUCKET_SIZE", "1000")
    with pytest.warns(RuntimeWarning, match=r"HORO_LITE_BUCKET_SIZE is set, but there is no such"):
        hvd.init()
    hvd.shutdown()
