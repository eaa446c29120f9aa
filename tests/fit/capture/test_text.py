"""Text: order, cursors, and files of every kind."""

import gzip
import io
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kvfit.errors import MismatchError, OptionError, RefError, TextError
from kvfit.fit.capture.sequences import Cursor, due, interleaved, sequences
from kvfit.fit.capture.text import TextOptions, documents, mix
from kvfit.fit.stats import digests

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


def test_a_dropped_connection_is_opened_again_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvfit.fit.capture import text

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
    (said,) = caplog.messages
    assert said == "org/name: found ConnectionError at document 5 (reset by peer); trying again in 2 s, 1 of 5"


def test_endless_failures_stop_with_an_error_that_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfit.fit.capture import text

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


PLAIN = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[:5]).encode()


@pytest.mark.parametrize("name", ["a[1].jsonl", "a?.jsonl", "a*.jsonl", "{a,b}.jsonl", "a b=0.5.jsonl", "A.JSONL"])
def test_a_file_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    """Beside it lies what such a pattern would match."""
    for other in ("a1.jsonl", "ab.jsonl", "a.jsonl", "b.jsonl"):
        (tmp_path / other).write_bytes(b'{"text": "another"}\n')
    (tmp_path / name).write_bytes(PLAIN)
    assert list(documents(TextOptions(str(tmp_path / name)))) == DOCUMENTS[:5]
    (text,) = mix([str(tmp_path / name)], TextOptions())
    assert (text.dataset, text.share) == (str(tmp_path / name), 1.0)


@pytest.mark.parametrize("codec", [None, "gzip", "zstd", "bz2"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".parquet"])
def test_compression_and_a_byte_order_mark_make_no_other_document(tmp_path: Path, suffix: str, codec: str | None) -> None:
    text = "Grüße, one line\nand another"
    if suffix == ".parquet":
        written = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": ["\ufeff" + text]}), written)
        contents = [written.getvalue()]
    else:
        plain = (text if suffix == ".txt" else json.dumps({"text": text}, ensure_ascii=False)).encode()
        contents = [plain, b"\xef\xbb\xbf" + plain]
        contents += [f"[{plain.decode()}]".encode(), b"\xef\xbb\xbf [" + plain + b"]"] if suffix == ".json" else []
    ending = {None: "", "gzip": ".gz", "zstd": ".zst", "bz2": ".bz2"}[codec]
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}{suffix}{ending}"
        with pyarrow.output_stream(str(path), compression=codec) as stream:
            stream.write(content)
        assert list(documents(TextOptions(str(path)))) == [text]


def test_everything_in_a_folder_is_read_or_refused_by_name(tmp_path: Path) -> None:
    """The three places where documents hide from a pattern, and files of the system that hold none."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "b.JSONL").write_bytes(b'{"text": "b"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "deep" / "er" / "c.jsonl").write_bytes(b'{"text": "c"}\n')
    for name in ("._a.jsonl", ".DS_Store", "dataset_info.json", "README.md"):
        (tmp_path / name).write_bytes(b"\x00\x05 not text")
    assert list(documents(TextOptions(str(tmp_path)))) == ["a", "b", "c"]
    (tmp_path / "deep" / "d.csv").write_bytes(b"text\nd\n")
    with pytest.raises(TextError, match=r"found \.csv \(first d\.csv\), needed files of one kind"):
        next(documents(TextOptions(str(tmp_path))))


def test_only_the_text_column_is_read(tmp_path: Path) -> None:
    """Another column changes its type, comes late, and is a map; the first file has no row."""
    for number, extra in enumerate((pyarrow.array([], pyarrow.string()), [3], [{"a": 1}])):
        table = pyarrow.table({"text": [f"t{number}"] * len(extra), "extra": extra})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    assert list(documents(TextOptions(str(tmp_path)))) == ["t1", "t2"]
    lines = [{"text": "a"}, {"text": "b", "extra": 1}, {"text": "c", "extra": {"x": [1]}}, {"text": "d", "extra": "s"}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(documents(TextOptions(str(tmp_path / "lines.jsonl")))) == ["a", "b", "c", "d"]
    with pytest.raises(TextError, match=r"found columns text, extra in document 0, needed text in 'body'"):
        next(documents(TextOptions(str(tmp_path / "1.parquet"), column="body")))


def test_generated_text_is_a_dataset_with_documents_of_any_length() -> None:
    first = list(islice(documents(TextOptions("demo:facts")), 3))
    assert list(islice(documents(TextOptions("demo:facts"), 1), 2)) == first[1:]
    assert len(set(map(digests.digest, first))) == 3
    found = list(islice(sequences(TextOptions("demo:facts"), Words(), seq_len=2000), 2))
    assert [len(sequence.ids) for sequence in found] == [2000, 2000]
    assert found[-1].cursor.short == 0
    resumed = sequences(TextOptions("demo:facts"), Words(), seq_len=2000, cursor=found[0].cursor)
    assert next(resumed) == found[1]


@pytest.fixture
def three(tmp_path: Path) -> tuple[TextOptions, ...]:
    """Three texts of different documents, and one document that is in two of them."""
    for name, letter in (("a", "x"), ("b", "y"), ("c", "z")):
        texts = [f"{letter}{number} one two three four" for number in range(60)] + ["shared one two three four"]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::-1]))
    return mix([f"{tmp_path}/a.jsonl=0.5", f"{tmp_path}/b.jsonl=0.3", f"{tmp_path}/c.jsonl=0.2"], TextOptions())


def test_texts_take_turns_by_their_shares(three: tuple[TextOptions, ...]) -> None:
    found = [sequence.text for sequence in islice(interleaved(three, Words(), seq_len=6), 100)]
    for length in range(1, 101):
        for number, share in enumerate((0.5, 0.3, 0.2)):
            assert abs(found[:length].count(number) - share * length) < 1
    assert [found.count(number) for number in range(3)] == [50, 30, 20]


def test_a_document_in_two_texts_is_taken_once(three: tuple[TextOptions, ...]) -> None:
    whole = list(islice(interleaved(three, Words(), seq_len=6), 100))
    names = [name for sequence in whole for name in sequence.documents]
    assert len(set(names)) == len(names) == 100
    assert [max(s.cursor.repeated for s in whole if s.text == number) for number in range(3)] == [0, 1, 1]


@pytest.mark.parametrize("pack", [False, True])
def test_a_mix_continues_exactly(three: tuple[TextOptions, ...], pack: bool) -> None:
    whole = list(islice(interleaved(three, Words(), seq_len=6, pack=pack), 60))
    cursors = [Cursor()] * 3
    seen: list[str] = []
    for stop, sequence in enumerate(whole, start=1):
        cursors[sequence.text] = sequence.cursor
        seen += sequence.documents
        if stop in (1, 2, 3, 17, 40):
            resumed = interleaved(three, Words(), seq_len=6, pack=pack, cursors=cursors, seen=seen)
            assert list(islice(resumed, 60 - stop)) == whole[stop:]


def test_a_mix_ends_with_the_text_that_is_due(three: tuple[TextOptions, ...]) -> None:
    # 61 documents of the first, of which every second sequence is: two of the others' are repeated by then.
    found = [sequence.text for sequence in interleaved(three, Words(), seq_len=6)]
    assert found.count(0) == 61
    assert due((0.5, 0.3, 0.2), [found.count(number) for number in range(3)]) == 0


@pytest.mark.parametrize(
    "word", ["demo:text=", "demo:text=half", "demo:text=0", "demo:text=-1", "demo:text=nan", "demo:text=inf"]
)
def test_a_share_that_cannot_be_is_refused(word: str) -> None:
    with pytest.raises(OptionError, match=r"--dataset: found share"):
        mix([word], TextOptions())


def test_options_of_the_hub_go_to_its_datasets() -> None:
    given = TextOptions(config="small", revision="main", split="test", column="body")
    hub, local = mix(["org/name=3", "demo:text"], given)
    assert (hub.config, hub.revision, hub.split, hub.column, hub.share) == ("small", "main", "test", "body", 3.0)
    assert local == TextOptions("demo:text", column="body")
    assert mix(["demo:text"], given)[0].config == "small"  # which reading it refuses
    with pytest.raises(OptionError, match="found demo:text twice"):
        mix(["demo:text", "demo:text=2"], given)


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(TextError, match=r"needed files of one kind"):
        next(documents(TextOptions(str(tmp_path))))


@pytest.mark.parametrize("pack", [False, True])
def test_a_document_that_came_before_is_skipped_and_counted(tmp_path: Path, pack: bool) -> None:
    """Wherever reading is resumed: what was seen goes along."""
    texts = [f"{number} one two three four five" for number in (0, 1, 0, 2, 1, 1, 3, 0, 4)]
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = TextOptions(str(path))
    whole = list(sequences(options, Words(), seq_len=7, pack=pack))
    once = list(dict.fromkeys(texts))
    assert [name for sequence in whole for name in sequence.documents] == list(map(digests.digest, once))
    assert whole[-1].cursor.repeated == 4
    words = [token for text in once for token in [*Words()(text)["input_ids"], *[Words.eos_token_id] * pack]]
    assert [token for sequence in whole for token in sequence.ids] == words[: 7 * len(whole)]
    for stop in range(1, len(whole)):
        seen = [name for sequence in whole[:stop] for name in sequence.documents]
        assert list(sequences(options, Words(), seq_len=7, pack=pack, cursor=whole[stop - 1].cursor, seen=seen)) == whole[stop:]


@pytest.mark.parametrize("pack", [False, True])
def test_what_is_skipped_at_the_end_is_counted_too(tmp_path: Path, pack: bool) -> None:
    long = "one two three four five"
    texts = ["a", "b", long, "c", long, "d", long]
    path = tmp_path / "end.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream = interleaved([TextOptions(str(path))], Words(), seq_len=6, pack=pack)
    *_, last = islice(stream, 3 if pack else 1)
    with pytest.raises(StopIteration) as caught:
        next(stream)
    end = caught.value.value
    assert (end.short, end.repeated) == (0 if pack else 4, 2)
    assert replace(end, short=last.cursor.short, repeated=last.cursor.repeated) == last.cursor


def test_documents_that_begin_alike_are_different_ones() -> None:
    assert digests.digest("You are helpful. What is 1 + 1?") != digests.digest("You are helpful. What is 1 + 2?")
    assert digests.digest("lone \ud800") != digests.digest("lone")
    assert len(digests.digest("")) == digests.LENGTH


def test_a_record_of_another_form_is_no_record() -> None:
    name = digests.digest("a")
    assert digests.of_recipe({"documents": name + name}) == {name}
    for value in (None, 3, [name], "", name[1:], name + "!" * digests.LENGTH):
        assert digests.of_recipe({"documents": value}) is None
    assert digests.of_recipe({}) is None
    assert digests.of_cursor(7) is None
    assert digests.of_cursor({"captured": ""}) == []


@pytest.mark.parametrize("change", [{"revision": "main"}, {"config": "small"}, {"split": "test"}])
def test_what_only_the_hub_has_is_refused_beside_a_local_text(jsonl: Path, change: dict[str, str]) -> None:
    option = "--split" if "split" in change else f"--dataset-{next(iter(change))}"
    for dataset in (str(jsonl), str(jsonl.parent), "demo:text"):
        with pytest.raises(MismatchError, match=f"{option}: found {next(iter(change.values()))} beside {dataset}"):
            next(documents(TextOptions(dataset, **change)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "found nothing in it"),
        ("latin.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1"), "found UnicodeDecodeError .* repair or remove"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "needed UTF-8 text"),
        ("prose.jsonl", b"not JSON\n", "one JSON object per line: repair or remove"),
        ("number.jsonl", b'{"text": 5}\n', "found a number in column 'text' of document 0, needed text"),
        ("null.jsonl", b'{"text": null}\n{"text": "a"}\n', "found null in column 'text'"),
        ("chat.jsonl", b'{"text": [{"role": "user", "content": "x"}]}\n', "found a list in column 'text'.*chat template"),
        ("table.csv", b"text\na\n", r"found \.csv, needed files of one kind"),
    ],
)
def test_a_file_that_is_no_text_is_said_with_what_helps(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=message) as caught:
        list(documents(TextOptions(str(tmp_path / name))))
    assert "--resume" not in str(caught.value)


def refuse_to_wait(_seconds: float) -> None:
    pytest.fail("waits for a file of this machine")


@pytest.mark.parametrize("codec", ["gzip", "zstd", "bz2"])
def test_a_damaged_file_of_this_machine_is_refused_at_once(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfit.fit.capture.text.time.sleep", refuse_to_wait)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "here"}\n')
    path = tmp_path / f"b.jsonl.{ {'gzip': 'gz', 'zstd': 'zst', 'bz2': 'bz2'}[codec] }"
    with pyarrow.output_stream(str(path), compression=codec) as stream:
        stream.write(PLAIN)
    path.write_bytes(path.read_bytes()[:-5])
    found = "found OSError at document .*needed a file that can be read to its end: replace it"
    for text, name in ((path, path), (tmp_path, f"{tmp_path}, {path.name}")):
        with pytest.raises(TextError, match=f"^{name}: {found}") as caught:
            list(documents(TextOptions(str(text))))
        assert "--resume" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_half_a_character_is_refused_with_its_place(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": "whole \U0001f600"}, {"text": "caf\xe9 \ud83d and more"}]
    path = tmp_path / f"b{suffix}"
    path.write_text(json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / f"a{suffix}").write_text(json.dumps({"text": "here"}))
    for text, name, number in ((path, path, 1), (tmp_path, f"{tmp_path}, b{suffix}", 2)):
        read = documents(TextOptions(str(text)))
        assert list(islice(read, number))[-1] == rows[0]["text"]
        with pytest.raises(TextError, match=rf"^{name}: found \\ud83d at character 5 of document {number}.*: remove it or"):
            next(read)


def test_an_empty_file_of_a_folder_is_no_fault_of_the_reader(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "here"}\n')
    assert list(documents(TextOptions(str(tmp_path)))) == ["here"]


def test_the_default_cursor_is_the_start() -> None:
    assert Cursor() == Cursor(**Cursor().to_json())


def test_white_space_makes_no_other_document() -> None:
    assert digests.digest("a  b\n\nc") == digests.digest(" a b c\n") != digests.digest("ab c")
    assert len(digests.digest("")) == digests.LENGTH
