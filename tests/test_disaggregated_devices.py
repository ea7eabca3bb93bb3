"""Prefill and decode on four devices each. The conformance test has it as a flag: a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from akv_jax.config import Disaggregation
from akv_jax.flags import argument_parser
from tests.serving.running import eventually
from tests.test_disaggregated import tokens

ROOT = Path(__file__).parent.parent


def test_the_flag() -> None:
    """Wrong ones are named, with what was expected."""
    assert Disaggregation.parse("prefill=4,decode=2") == Disaggregation(4, 2)
    assert Disaggregation.parse("decode=1, prefill=3").devices == 4
    for text in (
        "",
        "4,4",
        "prefill=4",
        "prefill=0,decode=4",
        "prefill=4,decode=-1",
        "prefill=4,decode=4,extra=1",
        "prefill=1,prefill=4,decode=4",
    ):
        with pytest.raises(ValueError, match=r"expected prefill=N,decode=M, each 1 or more, found"):
            Disaggregation.parse(text)
        with pytest.raises(SystemExit):
            argument_parser().parse_args(["--disaggregation", text])


@pytest.mark.long
def test_conformance_of_every_variety() -> None:
    """R2, R5: the same histories and tolerances as on one device. `make test` has next turns instead
    (`tests/test_conformance_next_turns.py`)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "spec/test_conformance.py"]
    options = ["--disaggregation", "prefill=4,decode=4", "-m", "not long"]
    ran = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert ran.returncode == 0, ran.stdout[-4000:]


def test_a_server_over_two_meshes(tiny_directory: Path, tmp_path: Path) -> None:
    """R5: `--disaggregation`, from the command line to the next turn, the metrics and the stored cache."""
    command = [sys.executable, "-m", "akv_jax.serve", "--model", str(tiny_directory), "--port", "0"]
    sizes = ["--max-total-tokens", "400", "--context-length", "128", "--chunked-prefill-size", "16"]
    sizes += ["--max-running-requests", "2", "--disaggregation", "prefill=2,decode=1", "--cache-dir", str(tmp_path)]
    server = subprocess.Popen([*command, *sizes], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = ""
        while "/v1/chat/completions" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        assert "prefill on" in said and "decode on" in said and "400 tokens" in said
        url = next(word for word in said.split() if word.startswith("http://"))
        with httpx.Client(base_url=url, timeout=60) as http:
            first, reply = tokens(0, 30).tokens, ()
            for history in ([["append", first]], None):
                operations = history or [["append", first], ["append", reply], ["append", [1, 2]]]
                body = {"operations": operations, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
                answer = http.post("/v1/sequence", json=body).json()
                reply = answer["choices"][0]["token_ids"]
            assert answer["cache"]["computed_tokens"] == 3
            moved = 'akv:transferred_pages_total{direction="%s"} %d.0'
            assert moved % ("to_decode", 33) in http.get("/metrics").text
            # The client has its answer before what was generated is back.
            eventually(lambda: moved % ("to_prefill", 8) in http.get("/metrics").text)
            assert http.get("/cache/tree").status_code == 200 and http.get("/health").status_code == 200
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
    assert list(tmp_path.glob("*")), "what is cached is stored"
