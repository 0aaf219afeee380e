"""Hub ids without a network: one sentence from every command, and no second attempt."""

import re

import huggingface_hub
import pytest

from bwsft.cli import main
from bwsft.utils import hub


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A machine that reaches nothing; the list of its attempts."""
    attempts = []

    class Session:
        def head(self, url, timeout):
            attempts.append(url)
            raise OSError("no route to the host")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hub.reachable.cache_clear()
    yield attempts
    hub.reachable.cache_clear()


NAMED = r"some/model is neither a folder here nor a repository that could be downloaded: .*; a "
NAMED += "local folder can be given instead"


@pytest.mark.parametrize("words", [
    "train llada-8b-lora --model some/model --data q.jsonl",
    "train debug --tokenizer some/model",
    "chat --model some/model",
    "generate --model some/model --prompt hello",
    "evaluate --task gsm8k --model some/model --data q.jsonl",
    "compare --model some/model --data q.jsonl",
    "export --model some/model --out out",
])
def test_commands_say_that_there_is_no_network(no_network, tmp_path, capsys, words):
    (tmp_path / "q.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    before = set(tmp_path.iterdir())
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert re.search(NAMED, said) and "the Hub can't be reached over the network" in said
    assert said.count("\n") == 1 and len(said) < 300
    assert len(no_network) == 1  # for tokenizer, model and data together
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [
    "generate --model runs/gone --prompt hello",
    "train debug --model runs/gone --data q.jsonl",
    "export --model runs/gone/checkpoints/step-3 --out out",
    "train debug --data runs/gone",
    "evaluate --task gsm8k --model runs/gone --data runs/gone",
])
def test_a_run_that_is_not_here_is_no_name_on_the_hub(no_network, capsys, tmp_path, words):
    (tmp_path / "q.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "runs/gone" in said and "Hub" not in said and said.count("\n") == 1
    assert not no_network  # nobody asked


def test_what_was_downloaded_before_is_read(no_network, tmp_path):
    snapshot = tmp_path / "cache/models--some--model/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    assert hub.snapshot("some/model", ["*.json"]) == snapshot


def test_a_repository_that_the_hub_does_not_give(monkeypatch):
    def refusing(error):
        def download(*_, **options):
            assert not options["local_files_only"]
            raise error

        return download

    monkeypatch.setattr(hub, "no_network", lambda: None)
    errors = huggingface_hub.errors
    for kind, said in (
        (errors.GatedRepoError, "accept the terms on its page"),
        (errors.RepositoryNotFoundError, "no such repository"),
    ):
        error = kind.__new__(kind)  # it wants the response of an HTTP library
        monkeypatch.setattr(huggingface_hub, "snapshot_download", refusing(error))
        with pytest.raises(FileNotFoundError, match=f"some/model is neither .*{said}"):
            hub.snapshot("some/model", ["*"])


def test_offline_by_choice(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set and it was not downloaded"):
        hub.snapshot("some/model", ["*"])
