"""vLLM's most used flags, as deployers' public files have them: each works or is answered.

The list is that of a count over 626 files of eleven repositories. A flag that is in none of our
tables would end with "unknown flag" and a guess, which is what this forbids.
"""

from __future__ import annotations

import shlex

import pytest

from penstock.deployments.cli.flags.serve import settings_given
from penstock.deployments.cli.main import build_parser, main
from penstock.deployments.config import config_from
from penstock.deployments.vllm_names.table import BY_NAME

# By the number of files, most first; with the commonest value of each.
MOST_USED = [
    "--tensor-parallel-size 8",
    "--max-model-len 4096",
    "--port 8000",
    "--model org/name",
    "--gpu-memory-utilization 0.9",
    "--trust-remote-code",
    "--served-model-name name",
    "--host 0.0.0.0",
    "--tool-call-parser hermes",
    "--enable-auto-tool-choice",
    "--max-num-seqs 64",
    "--enable-expert-parallel",
    "--max-num-batched-tokens 8192",
    "--reasoning-parser qwen3",
    "--data-parallel-size 2",
    "--speculative-config {}",
    "--no-enable-prefix-caching",
    "--kv-cache-dtype fp8",
    "--compilation-config {}",
    "--data-parallel-address 10.0.0.1",
    "--data-parallel-rpc-port 13345",
    "--headless",
    "--enforce-eager",
    "--quantization ascend",
    "--data-parallel-start-rank 1",
    "--data-parallel-size-local 1",
    "--kv-transfer-config {}",
    "--disable-log-requests",
    "--additional-config {}",
    "--pipeline-parallel-size 2",
    "--enable-prefix-caching",
    "--language-model-only",
    "--mm-encoder-tp-mode data",
    "--api-server-count 2",
    "--ssl-keyfile key",
    "--ssl-certfile cert",
    "--enable-ssl-refresh",
    "--seed 1024",
    "--disable-uvicorn-access-log",
    "--dtype bfloat16",
    "--async-scheduling",
    "--block-size 128",
    "--enable-chunked-prefill",
    "--load-format auto",
    "--tokenizer-mode auto",
    "--default-chat-template-kwargs {}",
    "--hf-overrides {}",
    "--chat-template template.jinja",
    "--swap-space 4",
    "--api-key secret",
    "--generation-config vllm",
    "--revision main",
    "--enable-sleep-mode",
    "--enable-lora",
    "--cpu-offload-gb 4",
]


@pytest.mark.parametrize("line", MOST_USED)
def test_it_works_or_ends_with_its_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = line.split()[0]
    arguments = ["serve", *shlex.split(line)]
    flag = BY_NAME.get(name)
    try:
        given = settings_given(build_parser().parse_args(arguments))
    except SystemExit:
        pytest.fail(f"{name} is unknown: {capsys.readouterr().err}")
    except Exception:
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert flag is not None and flag.sentence
        assert said == f"penstock: {line}: {flag.sentence}\n" or said.endswith(f"{flag.sentence}\n")
        return
    if not given.keys() & {"tls_key_file", "tls_cert_file"}:  # one of these needs the other
        config_from(given)


def test_the_forty_most_used_and_further_ones_are_in_the_list() -> None:
    names = [line.split()[0] for line in MOST_USED]
    assert len(names) == len(set(names)) == 55
