"""MediaWiki dumps written here, in the old and the new layout: what links to what, whatever the buffers cut."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random

import pytest

from gramtower.data import sources
from gramtower.data.readers import mediawiki as module
from gramtower.data.readers.mediawiki import is_mediawiki, mediawiki_links

CREATE = {
    "page": ["page_id", "page_namespace", "page_title", "page_restrictions", "page_is_redirect", "page_random"],
    "page new": ["page_id", "page_namespace", "page_title", "page_is_redirect", "page_random"],
    "redirect": ["rd_from", "rd_namespace", "rd_title", "rd_interwiki", "rd_fragment"],
    "pagelinks": ["pl_from", "pl_namespace", "pl_title", "pl_from_namespace"],
    "pagelinks new": ["pl_from", "pl_from_namespace", "pl_target_id"],
    "linktarget": ["lt_id", "lt_namespace", "lt_title"],
}
ODD = ["O'Brien", "Back\\slash", 'Say_"hi"', "A(1,0,'x',0),(b", "End;\nof\tline", "Zoë_日本", "--_INSERT_INTO_`page`"]
PAGES = [(1, 0, "Apple", 0), (2, 0, "Pear", 0), (3, 0, "Apples", 1), (4, 0, "Pomes", 1), (5, 1, "Apple", 0),
         (6, 0, "Round", 1), (7, 0, "Trip", 1), (8, 0, "Away", 1), (9, 0, "Gone", 1), (10, 0, "Alone", 0),
         *((20 + k, 0, title, 0) for k, title in enumerate(ODD))]  # fmt: skip
REDIRECTS = [(3, 0, "Apple", None), (4, 0, "Apples", ""), (6, 0, "Trip", ""), (7, 0, "Round", ""),
             (8, 0, "Pear", "de"), (9, 0, "Nowhere", "")]  # fmt: skip
LINKS = [(1, 0, "Pear"), (1, 0, "Apples"), (2, 0, "Pomes"), (2, 0, "Apple"), (2, 0, "Missing"), (2, 1, "Apple"),
         (2, 0, "Round"), (2, 0, "Away"), (2, 0, "Gone"), (5, 0, "Pear"), (3, 0, "Apple"), (99, 0, "Pear"),
         *((20 + k, 0, title) for k, title in enumerate(ODD[1:] + ODD[:1])), (1, 0, ODD[3])]  # fmt: skip
SPACED = [title.replace("_", " ") for title in ODD]
EXPECTED = {
    ("Apple", "Pear"), ("Pear", "Apple"), ("Apple", SPACED[3]), *zip(SPACED, SPACED[1:] + SPACED[:1], strict=True),
}  # fmt: skip


def quoted(value):
    if value is None:
        return "NULL"
    if isinstance(value, (int, float)):
        return str(value)
    for plain, escaped in (("\\", "\\\\"), ("'", "\\'"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        value = value.replace(plain, escaped)
    return f"'{value}'"


def dump(folder, name, rows, ending=".sql", per_insert=5, layout=None):
    columns = CREATE[layout or name]
    lines = [f"-- MariaDB dump of `{name}`, INSERT INTO is below", f"DROP TABLE IF EXISTS `{name}`;"]
    lines += [f"CREATE TABLE `{name}` ("] + [f"  `{column}` varbinary(255) NOT NULL DEFAULT ''," for column in columns]
    lines += [
        f"  PRIMARY KEY (`{columns[0]}`)",
        ") ENGINE=InnoDB DEFAULT CHARSET=binary;",
        f"LOCK TABLES `{name}` WRITE;",
    ]
    for start in range(0, len(rows), per_insert):
        values = ",".join("(" + ",".join(map(quoted, row)) + ")" for row in rows[start : start + per_insert])
        lines.append(f"INSERT INTO `{name}` VALUES {values};")
    data = ("\n".join(lines) + "\nUNLOCK TABLES;\n").encode()
    pack = {".sql": bytes, ".sql.gz": gzip.compress, ".sql.bz2": bz2.compress, ".sql.xz": lzma.compress}[ending]
    path = folder / f"simplewiki-20200901-{name}{ending}"
    path.write_bytes(pack(data))
    return path


def write(folder, new=False, links=LINKS, **options):
    pages = [(*row[:3], "", row[3], 0.25e-3) if not new else (*row, 0.25e-3) for row in PAGES]
    dump(folder, "page", pages, layout="page new" if new else "page", **options)
    dump(folder, "redirect", [(*row, None) for row in REDIRECTS], **options)
    if not new:
        dump(folder, "pagelinks", [(*row, 0) for row in links], **options)
        return folder
    targets = {target: 1000 - 7 * k for k, target in enumerate(dict.fromkeys(row[1:] for row in links))}
    dump(folder, "linktarget", [(key, *target) for target, key in targets.items()], **options)
    dump(folder, "pagelinks", [(row[0], 0, targets[row[1:]]) for row in links], layout="pagelinks new", **options)
    return folder


def pairs_of(found):
    coo = found.matrix.tocoo()
    return {(found.left_ids[i], found.right_ids[j]) for i, j in zip(coo.row, coo.col, strict=True)}


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("ending", [".sql", ".sql.gz", ".sql.bz2", ".sql.xz"])
def test_links_between_articles_with_redirects_followed(new, ending, tmp_path):
    found = mediawiki_links(write(tmp_path, new, ending=ending))
    assert pairs_of(found) == EXPECTED
    assert (found.left_name, found.right_name) == ("from", "to")
    assert is_mediawiki(tmp_path)


@pytest.mark.parametrize("new", [False, True])
def test_what_is_left_out_is_counted(new, tmp_path):
    report = mediawiki_links(write(tmp_path, new)).report
    assert (report["pages"], report["redirects"], report["rows"]) == (3 + len(ODD), 6, len(LINKS))
    assert report["rows_not_from_articles"] == 3  # a talk page, a redirect, a page that is not there
    assert report["rows_to_no_article"] == 5  # missing, another namespace, a circle, another wiki, nowhere
    assert report["rows_to_itself"] == 1  # Apple to Apples
    assert report["rows_merged"] == 1  # Pear to Pomes and to Apple
    assert report["pairs"] == len(EXPECTED) == len(LINKS) - 10


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 31, 100, 257])
def test_buffers_may_end_anywhere(new, size, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", size)
    assert pairs_of(mediawiki_links(write(tmp_path, new, per_insert=1 + size % 6))) == EXPECTED


def test_a_random_wiki_agrees_with_a_plain_walk(tmp_path):
    """Dictionaries, one link at a time, against the arrays of the reader."""
    draw = random.Random(0)
    pages = [(i + 1, 0 if draw.random() < 0.9 else 4, f"P{i}", int(draw.random() < 0.3)) for i in range(300)]
    redirects = [(page, 0, f"P{draw.randrange(330)}", "") for page, _, _, flag in pages if flag]
    links = [(draw.randrange(1, 320), 0, f"P{draw.randrange(330)}") for _ in range(4000)]
    dump(tmp_path, "page", [(*row[:3], "", row[3], 0.5) for row in pages], per_insert=50)
    dump(tmp_path, "redirect", [(*row, None) for row in redirects], per_insert=50)
    dump(tmp_path, "pagelinks", [(*row, 0) for row in links], per_insert=1000)
    names = {page: title for page, namespace, title, _ in pages if namespace == 0}
    leads = {names[page]: title for page, _, title, _ in redirects if page in names}
    redirect_pages = {title for page, namespace, title, flag in pages if flag and namespace == 0}
    expected = set()
    for source, _, title in links:
        steps = 0
        while title in redirect_pages and steps < 400:
            title, steps = leads.get(title), steps + 1
        known = title in names.values() and title not in redirect_pages
        if source in names and names[source] not in redirect_pages and known and names[source] != title:
            expected.add((names[source], title))
    assert len(expected) > 500
    assert pairs_of(mediawiki_links(tmp_path)) == expected


def test_text_is_unescaped():
    for written, meant in [
        (rb"'a\'b'", b"a'b"), (rb"'a''b'", b"a'b"), (rb"'\\'", b"\\"), (rb"'\\\''", b"\\'"),
        (rb"'\n\0\Z'", b"\n\0\x1a"), (rb"_binary 'x'", b"x"), (b"NULL", b""), (rb"'\%'", b"%"),
    ]:  # fmt: skip
        assert module.text_of(written) == meant


def test_dumps_that_lack_something_are_refused(tmp_path):
    write(tmp_path, new=True)
    for name in ("linktarget", "redirect", "page"):
        (tmp_path / f"simplewiki-20200901-{name}.sql").rename(tmp_path / "aside")
        with pytest.raises(ValueError, match=rf"{name}.sql.*{name}.sql.gz"):
            mediawiki_links(tmp_path)
        (tmp_path / "aside").rename(tmp_path / f"simplewiki-20200901-{name}.sql")
    dump(tmp_path, "page", []).rename(tmp_path / "dewiki-20200901-page.sql")
    write(tmp_path, new=True)
    with pytest.raises(ValueError, match=r"dewiki-20200901-page\.sql.*simplewiki-20200901-page\.sql"):
        mediawiki_links(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: data.rindex(b"'Pear'") + 3], "ends inside a row"),
        (lambda data: data.replace(b"CREATE TABLE", b"ALTER TABLE"), "without CREATE TABLE"),
        (lambda data: data.replace(b"`pl_title`", b"`pl_name`"), "columns pl_from, pl_namespace, pl_name"),
        (
            lambda data: data.replace(b"(2,0,'Pomes',0)", b"(2,0,Pomes,0)"),
            r"a row at byte \d+ begins .\(2,0,Pomes",
        ),
        (lambda data: data.replace(b"(2,0,'Pomes',0)", b"(2,0,'Pomes',0,0)"), "a row"),
        (lambda data: data.replace(b"` VALUES", b"` (`pl_title`,`pl_from`) VALUES"), "rows have columns pl_title"),
    ],
)
def test_a_damaged_dump_is_named(change, message, tmp_path):
    write(tmp_path)
    path = tmp_path / "simplewiki-20200901-pagelinks.sql"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        mediawiki_links(tmp_path)


def test_a_cut_archive_is_named(tmp_path):
    write(tmp_path, ending=".sql.gz")
    path = tmp_path / "simplewiki-20200901-pagelinks.sql.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged"):
        mediawiki_links(tmp_path)


def test_a_wiki_without_links_between_articles_is_refused(tmp_path):
    write(tmp_path, links=[(5, 0, "Pear")])
    with pytest.raises(ValueError, match="links"):
        mediawiki_links(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(1,0,'Apple'", "(1e5,0,'Apple'", "'1e5' in a column of ids"),
        ("(1,0,'Apple'", f"({'9' * 30},0,'Apple'", "in a column of ids"),
        ("(1,0,'Apple'", f"({'9' * 5000},0,'Apple'", "in a column of ids"),
        ("(1,0,'Apple'", "(1,0,17", "'17' in a column of text"),
        ("`page_random`", "`page_id`", "with 6 columns, expected at most 100, each once"),
        ("(1,0,'Apple'", "(1,0,Apple", r"a row at byte \d+"),
    ],
)
def test_values_that_do_not_fit_their_columns_are_shown(old, new, message, tmp_path):
    write(tmp_path)
    path = next(tmp_path.glob("*-page.sql"))
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message) as caught:
        mediawiki_links(tmp_path)
    assert path.name in str(caught.value)
