"""Text: order, cursors, and files of every kind."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from kvfit.errors import RefError, TextError
from kvfit.fit.text import Cursor, TextOptions, documents, sequences

DOCUMENTS = [f"document {number} " + "word " * (number % 7) for number in range(40)]


class Words:
    """A tokenizer of one id per word, with a beginning-of-sequence token that the text may carry already."""

    bos_token_id = 1
    eos_token_id = 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [1] if word_is_bos(text) else []
        ids += [10 + sum(map(ord, word)) % 1000 for word in text.split() if word != "<s>"]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def word_is_bos(text: str) -> bool:
    return text.startswith("<s>")


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def test_documents_come_in_order_from_any_start(jsonl: Path) -> None:
    options = TextOptions(str(jsonl))
    assert list(documents(options)) == DOCUMENTS
    assert list(documents(options, 33)) == DOCUMENTS[33:]


def test_parquet_txt_and_folders_are_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": DOCUMENTS}), tmp_path / "documents.parquet")
    assert list(documents(TextOptions(str(tmp_path / "documents.parquet"), column="body"))) == DOCUMENTS
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(("first\nline two", "second")):
        (folder / f"{number}.txt").write_text(text)
    assert list(documents(TextOptions(str(folder)))) == ["first\nline two", "second"]


def test_short_documents_are_skipped_and_counted(jsonl: Path) -> None:
    # A document has 3 tokens with its first, and up to 6 words more: 5 tokens need at least 2 of those.
    found = list(sequences(TextOptions(str(jsonl)), Words(), seq_len=5))
    long_enough = [number for number in range(40) if number % 7 >= 2]
    assert [sequence.cursor.last for sequence in found] == long_enough
    assert found[-1].cursor.short == sum(number % 7 < 2 for number in range(found[-1].cursor.last + 1))
    assert all(len(sequence.ids) == 5 for sequence in found)


@pytest.mark.parametrize("pack", [False, True])
def test_a_cursor_continues_exactly(jsonl: Path, pack: bool) -> None:
    options = TextOptions(str(jsonl))
    whole = list(sequences(options, Words(), seq_len=5, pack=pack))
    for stop in (1, 2, 7, len(whole) - 1):
        resumed = list(sequences(options, Words(), seq_len=5, pack=pack, cursor=whole[stop - 1].cursor))
        assert resumed == whole[stop:]


@pytest.mark.parametrize("pack", [False, True])
def test_changed_text_is_refused_on_resuming(jsonl: Path, pack: bool) -> None:
    options = TextOptions(str(jsonl))
    cursor = next(sequences(options, Words(), seq_len=5, pack=pack)).cursor
    changed = [json.dumps({"text": "other " + text}) + "\n" for text in DOCUMENTS]
    jsonl.write_text("".join(changed))
    with pytest.raises(TextError, match=r"other text in document \d+.*--dataset-revision"):
        list(islice(sequences(options, Words(), seq_len=5, pack=pack, cursor=cursor), 1))


def test_packed_sequences_join_documents_with_the_end_token(jsonl: Path) -> None:
    packed = [token for sequence in sequences(TextOptions(str(jsonl)), Words(), seq_len=4, pack=True) for token in sequence.ids]
    joined = [token for text in DOCUMENTS for token in [*Words()(text)["input_ids"], Words.eos_token_id]]
    assert packed == joined[: len(packed)]
    assert len(joined) - len(packed) < 4


def test_at_most_one_beginning_of_sequence_token(tmp_path: Path) -> None:
    path = tmp_path / "bos.jsonl"
    path.write_text(json.dumps({"text": "<s> one two three"}) + "\n")
    assert Words()("<s> one two three")["input_ids"][:2] == [1, 1]  # the tokenizer alone gives two
    (sequence,) = sequences(TextOptions(str(path)), Words(), seq_len=4)
    assert sequence.ids[0] == 1
    assert sequence.ids.count(1) == 1


def test_a_dropped_connection_is_opened_again_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfit.fit import text

    opened: list[int] = []

    class Flaky:
        def __init__(self, start: int = 0) -> None:
            self.start = start

        def skip(self, count: int) -> "Flaky":
            return Flaky(count)

        def __iter__(self):
            opened.append(self.start)
            for number in range(self.start, 40):
                if number == 5 and len(opened) == 1:
                    raise ConnectionError("reset by peer")
                yield {"text": DOCUMENTS[number]}

    monkeypatch.setattr(text, "_open", lambda _options: Flaky())
    monkeypatch.setattr(text.time, "sleep", lambda _seconds: None)
    assert list(documents(TextOptions("org/name"))) == DOCUMENTS
    assert opened == [0, 5]


def test_endless_failures_stop_with_an_error_that_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfit.fit import text

    class Dead:
        def skip(self, _count: int) -> "Dead":
            return self

        def __iter__(self):
            raise ConnectionError("reset by peer")
            yield

    monkeypatch.setattr(text, "_open", lambda _options: Dead())
    monkeypatch.setattr(text.time, "sleep", lambda _seconds: None)
    with pytest.raises(TextError, match=r"ConnectionError at document 0 \(reset by peer\).*--resume"):
        list(documents(TextOptions("org/name")))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("missing.jsonl", RefError, "no such file or folder"),
        ("demo:nothing", RefError, "needed one of demo:source"),
        ("demo:source", RefError, "found a model, needed a text"),
        ("org/name", RefError, "found no readable dataset"),
    ],
)
def test_what_is_not_there_is_named(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        next(documents(TextOptions(name)))


def test_a_missing_column_is_named_with_those_found(jsonl: Path) -> None:
    with pytest.raises(TextError, match=r"found columns text in document 0, needed text in 'body'"):
        next(documents(replace(TextOptions(str(jsonl)), column="body")))


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(TextError, match=r"needed files of one kind"):
        next(documents(TextOptions(str(tmp_path))))


def test_the_default_cursor_is_the_start() -> None:
    assert Cursor() == Cursor(**Cursor().to_json())
