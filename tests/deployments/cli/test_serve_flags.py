"""Help by group, and the configuration that --dump-config prints and --config reads."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.cli.flags.serve import FIRST, flag_of, help_text
from penstock.deployments.cli.main import main
from penstock.deployments.cli.serve import Warnings, WorkerCount
from penstock.deployments.cli.starting.summary import effective_settings, welcome
from penstock.deployments.config import ServeConfig, config_from, settings, settings_by_group
from penstock.deployments.config_file import as_yaml, read_config
from penstock.deployments.config_values import values_by_group
from penstock.deployments.supervision.view import ClusterView, IngressInfo, OperatorWarning
from penstock.workers.errors import ConfigError
from penstock.workers.settings import Setting
from penstock.workers.stats import EngineFacts, EngineStats, WorkerInfo

GROUPS = settings_by_group()


def flags_in(text: str) -> set[str]:
    return {*re.findall(r"^  (--[\w-]+)[ ,\n]", text, re.MULTILINE)}


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_first_screen_has_ten_settings_and_names_the_groups(capsys):
    text = help_of(capsys, "--help")
    assert flags_in(text) - {"--config", "--dump-config"} == {flag_of(name) for name in FIRST}
    assert "--help=all" in text
    assert len(re.findall(r"^  --help=", text, re.MULTILINE)) == len(GROUPS)
    assert text == help_of(capsys, "-h")


def test_all_settings_are_shown_and_no_flag_of_vllm(capsys):
    flags = flags_in(help_of(capsys, "--help=all"))
    assert flags == {flag_of(each.name) for each in settings()} - {"--model"} | {
        "--config",
        "--dump-config",
    }


@pytest.mark.parametrize("title", GROUPS)
def test_each_group_is_shown_by_its_name_in_the_first_screen(title):
    wanted = {flag_of(each.name) for each in GROUPS[title]} - {"--model"}
    name = title.lower().replace(" ", "-")
    assert f"--help={name} " in help_text(None)
    assert flags_in(help_text(name)) == wanted
    assert flags_in(help_text(title)) == wanted


def test_a_group_may_be_shortened_and_a_setting_named():
    assert flags_in(help_text("experts")) == flags_in(
        help_text("experts-of-mixture-of-experts-models")
    )
    for topic in ("max-model-len", "max_model_len", "--max-model-len"):
        assert flags_in(help_text(topic)) == {"--max-model-len"}
    with pytest.raises(ConfigError, match="groups: all, model, listeners"):
        help_text("nonsense")


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    """Values that the setting takes by itself."""
    values: st.SearchStrategy[Any]
    low, high = setting.min, setting.max
    if setting.choices:
        values = st.sampled_from(setting.choices)
    elif setting.kind is bool:
        values = st.booleans()
    elif setting.kind is int:
        values = st.integers(int(low or 1), int(high or 10**9))
    elif setting.kind is float:
        values = st.floats(low if low is not None else 1e-6, high or 1e9, allow_nan=False)
    else:
        text = st.text(min_size=1).filter(lambda each: each.lower() not in ("none", "null"))
        values = st.one_of(text, st.lists(text, min_size=2).map(tuple)) if setting.is_list else text
    if setting.is_range:
        values = st.one_of(values, st.integers(1, 90).map(lambda n: f"{n}:{n + 7}"))
    return st.one_of(st.none(), values) if setting.optional else values


@given(st.fixed_dictionaries({}, optional={each.name: values_of(each) for each in settings()}))
def test_what_is_dumped_is_read_again(values):
    groups: dict[str, dict[str, Any]] = {"some": values} if values else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "penstock.yaml"
        file.write_text(as_yaml(groups), encoding="utf-8")
        read = read_config(str(file))
    known = {each.name: each for each in settings()}
    assert {name: known[name].parse(value) for name, value in read.items()} == values


@pytest.mark.parametrize("text", ["a\x85b", "þ\x85E", "a\u2028b", "\x85", "a\r\nb", 'a\x85"b\\'])
def test_a_line_break_within_a_text_is_kept(tmp_path, text):
    file = tmp_path / "penstock.yaml"
    file.write_text(as_yaml({"some": {"host": text}}), encoding="utf-8")
    assert read_config(str(file)) == {"host": text}


def test_the_whole_configuration_is_dumped_and_read_again(tmp_path, capsys):
    arguments = [
        *("serve", "org/name", "--served-model-name", "a", "b", "--num-workers", "1:8"),
        *("--kv-cache-dtype", "fp8", "--kv-group", "8", "--enforce-eager"),
        *("--max-model-len", "32Ki"),
        *("--host", "::1", "--state-prefix", "on", "--kv-cache-gb", "1.5GB"),
    ]
    assert main([*arguments, "--dump-config"]) == 0
    dumped = capsys.readouterr().out
    file = tmp_path / "penstock.yaml"
    file.write_text(dumped)
    config = config_from(read_config(str(file)))
    assert (config.served_model_name, config.num_workers) == (("a", "b"), "1:8")
    engine = config.engine
    assert (engine.model, engine.kv, engine.kv_group, engine.cuda_graphs) == (
        *("org/name", "fp8", "8", "off"),
    )
    assert (engine.max_model_len, engine.kv_cache_gb, config.state_prefix) == (32768, 1.5, "on")
    assert as_yaml(values_by_group(config)) == dumped
    assert main(["serve", "--config", str(file), "--http-port", "9000", "--dump-config"]) == 0
    assert capsys.readouterr().out == dumped.replace("http_port: 8000", "http_port: 9000")


def test_a_configuration_that_cannot_be_is_not_dumped(capsys):
    assert main(["serve", "--http-port", "9400", "--dump-config"]) == 2
    said = capsys.readouterr()
    assert "metrics_port must differ" in said.err and not said.out


def test_names_do_not_swallow_the_model(capsys):
    assert main(["serve", "--served-model-name", "a", "./ckpt", "--dump-config"]) == 2
    assert "`penstock serve ./ckpt --served-model-name a`" in capsys.readouterr().err
    assert main(["serve", "--served-model-name", "a", "--dump-config"]) == 0
    assert "served_model_name: a\n" in capsys.readouterr().out


def test_what_is_in_force_is_said_at_start():
    facts = EngineFacts("the CPU with 2 threads", "bfloat16", "native", "int8, a scale for 32")
    info = WorkerInfo("a:1", 1, "t", 1, "m", max_model_len=2048, weights="bf16", engine=facts)
    stats = EngineStats(num_blocks=320, block_size=16, max_num_seqs=64)
    given = {"model": "org/name", "revision": "0123456789abcdef" + "0" * 24, "api_keys_file": "k"}
    config = config_from(given)
    assert effective_settings(config, [(info, stats)], "there").splitlines() == [
        "  model      org/name at 0123456789ab: up to 2,048 tokens of prompt and answer; "
        "bf16 weights",
        "  computes   in bfloat16 on the CPU with 2 threads; native attention",
        "  KV cache   int8, a scale for 32, 320 blocks of 16 tokens a worker: 5,120 tokens, "
        "2.5 requests of 2,048 tokens at a time; at most 64 in a step; prefix caching on",
        "  admission  predicted; at most 1,024 requests wait, each up to 120 s; num_workers 1, "
        "num_ingress 1",
        "  access     no TLS; API keys of k, from this machine only",
        "  logs       there",
    ]
    drafting = replace(info, engine=replace(facts, drafts="the text of the request"))
    lines = effective_settings(config, [(drafting, stats)]).splitlines()
    assert lines[3] == "  drafts     by the text of the request"
    admission, access = effective_settings(config_from({"num_workers": "0:4"}), []).splitlines()
    assert "num_workers 0:4" in admission and "each up to 600 s" in admission
    open_to = config_from(
        {
            "tls_cert_file": "c",
            "tls_key_file": "k",
            "tls_client_ca_file": "a",
            "host": "0.0.0.0",
            "insecure": True,
            "admission": "optimistic",
        }
    )
    admission, access = effective_settings(open_to, []).splitlines()
    assert access == "  access     TLS with client certificates; no API keys at 0.0.0.0"
    assert "optimistic, without a gate" in admission


def test_the_command_to_try_is_one_that_reaches_the_server():
    given = {"host": "0.0.0.0", "tls_cert_file": "c", "tls_key_file": "k", "api_keys_file": "keys"}
    text = welcome(config_from(given), ClusterView())
    assert "  HTTP  https://0.0.0.0:8000/v1" in text
    # No certificate has a wildcard address, and a client needs a key.
    wanted = "penstock chat --url https://localhost:8000 --ca-file CA --api-key-file FILE\n"
    assert wanted in text
    assert "penstock chat\n" in welcome(config_from({}), ClusterView())


@pytest.mark.parametrize("value", ["\x85", "a\u2028b", "\u2029 ", "a\nb", "é: #"])
def test_line_breaks_of_any_kind_are_dumped_as_they_are(value, tmp_path):
    (tmp_path / "x.yaml").write_text(
        as_yaml({"model": {"served_model_name": value}}), encoding="utf-8"
    )
    assert read_config(str(tmp_path / "x.yaml")) == {"served_model_name": value}


def seen(*workers: tuple[str, int]) -> ClusterView:
    """A view of workers, each a model and an epoch."""
    infos = [WorkerInfo(f"a:{each}", each << 32, "", 1, model, 9) for model, each in workers]
    return ClusterView(workers=tuple((info, EngineStats()) for info in infos))


def test_a_lost_worker_is_reported_with_its_model_where_there_are_several():
    config = config_from({"models": [{"model": "builtin"}, {"model": "builtin-moe"}]})
    lines: list[str] = []
    counts = [WorkerCount(each, lines.append) for each in config.each_model]
    first, lost, replaced = ("builtin", 1), ("builtin-moe", 2), ("builtin-moe", 3)
    for view in (seen(first, lost), seen(first), seen(replaced, first)):
        for count in counts:
            count.report(view)
    gone = "does not report, and is replaced if it has ended"
    assert lines == [
        f"worker 00000002 of builtin-moe {gone}: 0 of 1 workers serve",
        "worker 00000003 of builtin-moe is ready: 1 of 1 workers serve",
    ]
    WorkerCount(ServeConfig(), lines.append).report(seen())  # lost before it was seen
    assert lines[2:] == [f"a worker {gone}: 0 of 1 workers serve"]


def test_a_worker_that_is_replaced_before_it_is_missed_is_said_to_be_gone_all_the_same():
    lines: list[str] = []
    now_s = 0.0
    count = WorkerCount(ServeConfig(), lines.append, lambda: now_s)
    old, both, new = seen(("m", 1)), seen(("m", 1), ("m", 2)), seen(("m", 2))
    for view in (old, both):
        count.report(view)
    now_s = 3.9
    count.report(both)
    assert lines == []
    count.report(new)
    assert lines == [
        "worker 00000001 does not report, and is replaced if it has ended: 1 of 1 workers serve",
        "worker 00000002 is ready: 1 of 1 workers serve",
    ]
    count.report(seen(("m", 2), ("m", 3)))  # as in an update: both serve
    now_s = 7.8
    count.report(seen(("m", 2), ("m", 3)))
    assert lines[2:] == []
    now_s = 8.0
    count.report(seen(("m", 2), ("m", 3)))
    assert lines[2:] == ["worker 00000003 is ready: 2 of 1 workers serve"]


def test_a_worker_whose_report_came_late_is_not_called_replaced():
    lines: list[str] = []
    count = WorkerCount(config_from({"num_workers": 2}), lines.append)
    both, one = seen(("m", 1), ("m", 2)), seen(("m", 1))
    for view in (both, one, one, both, seen(("m", 2), ("m", 3))):
        count.report(view)
    assert lines == [
        "worker 00000002 does not report, and is replaced if it has ended: 1 of 2 workers serve",
        "worker 00000002 reports again: 2 of 2 workers serve",
        "worker 00000001 does not report, and is replaced if it has ended: 2 of 2 workers serve",
        "worker 00000003 is ready: 2 of 2 workers serve",
    ]


def warned(*ingresses: tuple[OperatorWarning, ...]) -> ClusterView:
    return ClusterView(
        ingresses=tuple(
            IngressInfo(f"i{each}", 1, "", "", 0, warnings=warnings)
            for each, warnings in enumerate(ingresses)
        )
    )


def test_a_warning_of_an_ingress_is_said_once_and_when_it_is_over():
    lines: list[str] = []
    warnings = Warnings(lines.append)
    store = OperatorWarning("the store is away", "10.0.0.9: refused")
    tried_again = replace(store, detail="10.0.0.9: no route")
    keys = OperatorWarning("the keys are bad")
    for view in (warned(()), warned((store,)), warned((tried_again,), ()), warned((), (store,))):
        warnings.report(view)
    assert lines == ["WARNING: the store is away (10.0.0.9: refused)"]
    warnings.report(ClusterView())  # a registry that has just started knows no ingress yet
    warnings.report(warned((), (store, keys)))
    assert lines[1:] == ["WARNING: the keys are bad"]
    for view in (warned((), ()), warned(())):
        warnings.report(view)
    assert lines[2:] == ["no longer: the keys are bad", "no longer: the store is away"]
    warnings.report(warned((store,)))
    assert lines[4:] == ["WARNING: the store is away (10.0.0.9: refused)"]
