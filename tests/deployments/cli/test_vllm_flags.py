"""vLLM's flags of `serve`: each gives its settings, or ends with its sentence and exit status 2."""

from __future__ import annotations

import argparse
import shlex

import pytest

from penstock.deployments.cli.flags.serve import settings_given
from penstock.deployments.cli.main import build_parser, main
from penstock.deployments.config import ServeConfig, config_from, settings
from penstock.deployments.vllm_names.flag import NO_VALUE, translated
from penstock.deployments.vllm_names.table import BY_NAME, FLAGS, SAME
from penstock.workers.errors import ConfigError

KNOWN = {setting.name: setting for setting in settings()}
EXAMPLES = {int: "16", float: "0.5", str: "text"}  # texts that a setting of the kind takes
# The forty most used flags of vLLM, and further ones, as deployers write them.
LINES: dict[str, dict[str, object]] = {
    "--model org/name": {"model": "org/name"},
    "--max-model-len 4096": {"max_model_len": 4096},
    "--port 9000": {"http_port": 9000},
    "--served-model-name other": {"model_name": "other"},
    "--host ::1": {"host": "::1"},
    "--max-num-seqs 8": {"max_num_seqs": 8},
    "--max-num-batched-tokens 512": {"max_num_batched_tokens": 512},
    "--seed 7": {"seed": 7},
    "--block-size 32": {"block_size": 32},
    "--revision v2": {"revision": "v2"},
    "--data-parallel-size 3": {"num_workers": 3},
    "-dp 3": {"num_workers": 3},
    "--api-server-count 2": {"num_ingress": 2},
    "--enable-prefix-caching": {"prefix_cache": True},
    "--no-enable-prefix-caching": {"prefix_cache": False},
    "--kv-cache-dtype fp8": {"kv": "fp8"},
    "--kv-cache-dtype fp8_e4m3": {"kv": "fp8"},
    "--kv-cache-dtype auto": {"kv": "auto"},
    "--kv-cache-dtype=int8": {"kv": "int8"},
    "--enforce-eager": {"cuda_graphs": "off"},
    "--async-scheduling": {"async_scheduling": "on"},
    "--no-async-scheduling": {"async_scheduling": "off"},
    "--dtype bfloat16": {"weights": "bf16"},
    "--dtype float32": {"weights": "fp32"},
    "--dtype auto": {"weights": "auto"},
    "--quantization awq": {"weights": "auto"},
    "-q fp8": {"weights": "fp8"},
    "--quantization bitsandbytes": {"weights": "nf4"},
    "--quantization fp8 --dtype bfloat16": {"weights": "fp8"},
    "--dtype bfloat16 --quantization fp8": {"weights": "fp8"},
    "--dtype bfloat16 --weights int8": {"weights": "int8"},
    "--swap-space 4": {"host_kv_gb": 4.0},
    "--swap-space 0": {"host_kv_gb": None},
    "--num-gpu-blocks-override 99": {"num_blocks": 99},
    "--ssl-keyfile k --ssl-certfile c --ssl-ca-certs a": {
        "tls_key_file": "k",
        "tls_cert_file": "c",
        "tls_client_ca_file": "a",
    },
    "--reasoning-parser qwen3": {"reasoning_marks": "<think> </think>"},
    "--reasoning-parser mistral": {"reasoning_marks": "[THINK] [/THINK]"},
    "--uvicorn-log-level warning": {"log_level": "warning"},
    "--tensor-parallel-size 1 -pp 1": {},
    "-tp 2 --device cpu": {"tensor_parallel_size": 2, "device": "cpu"},
    "-pp 2 --device cpu": {"pipeline_parallel_size": 2, "device": "cpu"},
    "--enable-auto-tool-choice --tool-call-parser llama3_json": {"tool_call_parser": "llama3_json"},
    "--reasoning-parser openai_gptoss": {"reasoning_marks": "openai_gptoss"},
    "--enable-chunked-prefill --disable-log-requests": {},
    "--load-format auto --tokenizer-mode auto": {},
    "--language-model-only --disable-uvicorn-access-log --enable-ssl-refresh": {},
    "--distributed-executor-backend ray --data-parallel-backend ray": {},
    "--max_model_len 4096 --kv_cache_dtype=fp8": {"max_model_len": 4096, "kv": "fp8"},
    "--port 9 --http-port 10": {"http_port": 10},
    "--http-port 10 --port 9": {"http_port": 9},
    """--speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'""": {
        "speculate": "lookup",
        "speculate_tokens": 5,
    },
    """--speculative-config '{"method": "suffix", "suffix_decoding_max_tree_depth": 9}'""": {
        "speculate": "suffix",
        "speculate_tokens": 15,
    },
    """--speculative-config '{"model": "org/small", "num_speculative_tokens": 4}'""": {
        "speculate": "draft",
        "draft_model": "org/small",
        "speculate_tokens": 4,
    },
    """--speculative-config '{"model": "org/small", "draft_tensor_parallel_size": 1}'""": {
        "speculate": "draft",
        "draft_model": "org/small",
    },
}
REFUSED = {
    "--decode-context-parallel-size 2": "a context lies on one worker",
    "--gpu-memory-utilization 0.9": "--kv-cache-gb X",
    "--trust-remote-code": "runs no code from a checkpoint",
    "--enable-eplb": "a fixed part of the experts",
    '--speculative-config {"method":"eagle","model":"x"}': "by trained heads",
    '--speculative-config {"method":"ngram","model":"x"}': "by trained heads",
    '--speculative-config {"method":"draft_model"}': "by trained heads",
    '--speculative-config {"model":"x","draft_tensor_parallel_size":2}': "by trained heads",
    "--speculative-config ngram": "by trained heads",
    "--speculative-model x": "--speculate draft --draft-model X",
    "--reasoning-parser step3": "deepseek_r1, qwen3",
    "--compilation-config 3": "--cuda-graphs",
    "-O3": "--cuda-graphs",
    "--data-parallel-address 10.0.0.1": "--ray-address HOST:PORT",
    "--headless": "--ray-address HOST:PORT",
    "--kv-transfer-config {}": "--host-kv-gb",
    "--additional-config {}": "no plugins",
    "--api-key secret": "--api-keys-file keys",
    "--kv-cache-dtype fp8_e5m2": "--kv takes",
    "--dtype half": "bfloat16 or float32",
    "--quantization gguf2": "--weights int8",
    "--enable-sleep-mode": "--num-workers 0:N",
    "--cpu-offload-gb 4": "--expert-cache-gb",
    "--limit-mm-per-prompt {}": "serves text",
    "--hf-overrides {}": "config.json",
}


def config_of(line: str) -> ServeConfig:
    return config_from(settings_given(build_parser().parse_args(["serve", *shlex.split(line)])))


def value_of(config: ServeConfig, name: str) -> object:
    return getattr(config if hasattr(config, name) else config.engine, name)


@pytest.mark.parametrize("line", LINES)
def test_a_line_for_vllm_configures_the_same_here(line):
    config = config_of(line)
    wanted = LINES[line]
    assert {name: value_of(config, name) for name in wanted} == wanted
    if not wanted:
        assert config == ServeConfig()


@pytest.mark.parametrize("line", REFUSED)
def test_a_flag_without_a_counterpart_is_refused_with_what_to_do(line, capsys):
    assert main(["serve", *shlex.split(line)]) == 2
    said = capsys.readouterr()
    assert REFUSED[line] in said.err and said.err.startswith(f"penstock: {line[:2]}")
    assert said.err.count("\n") == 1 and not said.out


def entries() -> list[tuple[str, str]]:
    """Each name in the table, with each of its values, and one value that it does not have."""
    return [
        (name, value)
        for flag in FLAGS
        for name in flag.names
        for value in (*flag.values, *(["other"] if flag.nargs != 0 else []))
    ]


@pytest.mark.parametrize(("name", "value"), entries())
def test_every_entry_works_or_answers_with_its_sentence(name, value, capsys):
    flag = BY_NAME[name]
    if value == "other" and flag.setting is not None:
        value = "name" if flag.setting == "model" else EXAMPLES[KNOWN[flag.setting].kind]
    arguments = ["serve", name, *([value] if value != NO_VALUE else [])]
    if value == "other":
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"penstock: {name} other: {flag.sentence}\n"
        return
    given = settings_given(build_parser().parse_args(arguments))
    wanted = flag.values.get(value, {flag.setting: value})
    assert given == wanted
    if not given.keys() & {"tls_key_file", "tls_cert_file", "tls_client_ca_file"}:
        config_from(given)  # one of these needs another


def test_the_table_is_of_our_settings_and_each_name_is_once():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names)) > 120
    assert set(SAME) <= KNOWN.keys()
    for flag in FLAGS:
        assert all(name == name.lower() or name == "-O" for name in flag.names)
        assert flag.setting is None or flag.setting in KNOWN
        assert flag.sentence or flag.setting or all(flag.values.values())
        for settings_of_value in flag.values.values():
            for name, value in settings_of_value.items():
                assert KNOWN[name].parse(value) == value


@pytest.mark.parametrize(
    "flag", [each for each in FLAGS if each.sentence], ids=lambda flag: flag.names[0]
)
def test_a_sentence_names_flags_that_exist(flag):
    (commands,) = (
        each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    serve = commands.choices["serve"]
    known = {option for action in serve._actions for option in action.option_strings}
    words = flag.sentence.replace("`", " ").replace(":", " ").replace(",", " ").split()
    ours = {word.strip(".;()") for word in words if word.startswith("--")}
    assert ours - {"--file", "--tenant"} <= known


def test_a_file_may_have_the_names_of_vllm(tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: org/name\nport: 9000\nkv-cache-dtype: fp8\nenforce-eager: true\n"
        "enable-prefix-caching: false\ntensor-parallel-size: 1\nasync-scheduling: true\n"
        "max-model-len: 4096\ndtype: bfloat16\nquantization: fp8\nenable-lora: false\n"
    )
    config = config_of(f"--config {file} --port 9001")
    engine = config.engine
    assert (engine.model, config.http_port, engine.kv) == ("org/name", 9001, "fp8")
    assert (engine.cuda_graphs, engine.prefix_cache) == ("off", False)
    assert (engine.async_scheduling, engine.max_model_len) == ("on", 4096)
    assert engine.weights == "fp8"
    file.write_text("gpu-memory-utilization: 0.9\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert "gpu_memory_utilization 0.9: say with --kv-cache-gb" in capsys.readouterr().err


def test_a_mapping_in_a_file_is_answered_as_the_flag_is(tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    file.write_text("speculative-config:\n  method: mtp\n")
    assert main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert 'speculative_config {"method": "mtp"}: ' in error and "by trained heads" in error
    file.write_text("speculative-config:\n  method: ngram\n")
    assert config_of(f"--config {file}").engine.speculate == "lookup"


def test_names_of_a_file_that_nobody_knows_stay_for_the_error():
    assert translated({"num_worker": 2}, frozenset(KNOWN), BY_NAME) == {"num_worker": 2}
    with pytest.raises(ConfigError, match="port needs a value"):
        translated({"port": None}, frozenset(KNOWN), BY_NAME)
    with pytest.raises(ConfigError, match="enforce_eager says what cuda_graphs is, too"):
        translated({"enforce_eager": True, "cuda_graphs": "on"}, frozenset(KNOWN), BY_NAME)
    with pytest.raises(ConfigError, match="port is another name of http_port"):
        translated({"port": 9, "http_port": 8}, frozenset(KNOWN), BY_NAME)
