"""Layouts of public data sets, from small files written here and, where present, the real ones."""

from __future__ import annotations

import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest
from cases import zstandard

from gramtower.data import readers

pytest.importorskip("polars", reason="reading tables needs polars")

SHARED = Path(__file__).parents[2] / "shared" / "data"
DAT = "1::10::5::978300760\n1::20::3::978302109\n2::10::4::978301968\n"
CSV = "userId,movieId,rating,timestamp\n1,10,5.0,978300760\n1,20,3.0,978302109\n2,10,4.0,978301968\n"
TAB = "1\t10\t5\t978300760\n1\t20\t3\t978302109\n2\t10\t4\t978301968\n"


def pairs_of(interactions):
    entries = interactions.matrix.tocoo()
    return {
        (interactions.left_ids[i], interactions.right_ids[j]) for i, j in zip(entries.row, entries.col, strict=True)
    }


@pytest.mark.parametrize(("name", "text"), [("ratings.dat", DAT), ("ratings.csv", CSV), ("u.data", TAB)])
@pytest.mark.parametrize("zipped", [False, True])
def test_movielens_layouts_read_alike(tmp_path, name, text, zipped):
    (tmp_path / name).write_text(text)
    place = tmp_path
    if zipped:
        place = tmp_path / "ml.zip"
        with zipfile.ZipFile(place, "w") as archive:
            archive.write(tmp_path / name, f"ml-latest/{name}")
            archive.writestr("ml-latest/README.txt", "about")
    pairs = readers.movielens(place)
    assert pairs_of(pairs) == {("1", "10"), ("2", "10")}
    assert pairs.times.tolist() == [978300760, 978301968]
    assert (pairs.left_name, pairs.right_name) == ("user", "movie")
    assert readers.movielens(place, times=False).times is None
    assert readers.movielens(place, threshold=None, labels=True).matrix.toarray().tolist() == [[5, 3], [4, 0]]


@pytest.mark.parametrize("zipped", [False, True])
def test_movielens_10m_has_half_stars(tmp_path, zipped):
    """The layout of ml-10m.zip: a folder ml-10M100K, and a long run of whole stars before the first half."""
    rows = [(user, movie, 5) for user in range(1, 41) for movie in range(1, 31)]
    rows += [(1, 99, 4.5), (2, 99, 3.5), (3, 99, 4), (4, 99, 0.5)]
    text = "".join(f"{user}::{movie}::{rating}::838985046\n" for user, movie, rating in rows)
    place = tmp_path / ("ml-10m.zip" if zipped else "ml-10M100K")
    if zipped:
        with zipfile.ZipFile(place, "w") as archive:
            for name in ("movies.dat", "tags.dat", "README.html"):
                archive.writestr(f"ml-10M100K/{name}", "1::x::y\n")
            archive.writestr("ml-10M100K/ratings.dat", text)
    else:
        place.mkdir()
        (place / "ratings.dat").write_text(text)
        (place / "tags.dat").write_text("1::2::tag::1\n")
    found = readers.movielens(place)
    assert len(found) == 1200 + 2
    assert {user for user, movie in pairs_of(found) if movie == "99"} == {"1", "3"}
    assert found.report["rows_below_threshold"] == 2


def test_movielens_without_timestamps_and_compressed(tmp_path):
    path = tmp_path / "ratings_no_timestamp.dat.xz"
    path.write_bytes(lzma.compress(b"1::10::5\n2::10::4\n"))
    assert pairs_of(readers.movielens(path)) == pairs_of(readers.movielens(tmp_path)) == {("1", "10"), ("2", "10")}
    with pytest.raises(ValueError, match=r"times.*True"):
        readers.movielens(path, times=True)


def test_movielens_that_is_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"notes.txt.*ratings.dat"):
        readers.movielens(tmp_path)
    with pytest.raises(ValueError, match="MovieLens"):
        readers.movielens(tmp_path / "notes.txt")


def test_movielens_tables(tmp_path):
    (tmp_path / "movies.dat").write_bytes("10::Les Misérables (1995)::Drama|Musical\n".encode("latin-1"))
    (tmp_path / "users.dat").write_text("1::F::1::10::02460\n")
    assert readers.movielens_table(tmp_path, "movies").rows() == [("10", "Les Misérables (1995)", "Drama|Musical")]
    assert readers.movielens_table(tmp_path, "users").row(0, named=True)["zip"] == "02460"
    modern = tmp_path / "movies.csv"
    modern.write_text('movieId,title,genres\n7,"Mask, The (1994)",Comedy\n')
    assert readers.movielens_table(modern, "movies").rows() == [("7", "Mask, The (1994)", "Comedy")]


def test_item_lists(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("0 5 6\n1\n\n2 6  5 5 \r\n")
    pairs = readers.item_lists(path)
    assert pairs_of(pairs) == {("0", "5"), ("0", "6"), ("2", "6"), ("2", "5")}
    assert (pairs.report["lines_without_pairs"], pairs.report["rows_merged"]) == (1, 1)
    (tmp_path / "t.txt.zst").write_bytes(zstandard(b"0 5 6\n\n2 6\n"))
    assert pairs_of(readers.item_lists(tmp_path / "t.txt.zst")) == {("0", "5"), ("0", "6"), ("2", "6")}
    path.write_text("1\n2\n")
    with pytest.raises(ValueError, match="two ids"):
        readers.item_lists(path)


def test_thesaurus_words_may_have_spaces(tmp_path):
    path = tmp_path / "words.txt.xz"
    path.write_bytes(lzma.compress(b"swift,quick,like lightning\nslow,poky\n"))
    pairs = readers.thesaurus(path)
    assert pairs_of(pairs) == {("swift", "quick"), ("swift", "like lightning"), ("slow", "poky")}
    path.write_bytes(lzma.compress(b"caf\xe9,bar\n"))
    assert pairs_of(readers.thesaurus(path, encoding="latin-1")) == {("café", "bar")}
    with pytest.raises(ValueError, match="utf8"):
        readers.thesaurus(path)


@pytest.mark.parametrize(
    ("text", "separator"),
    [("# a graph\na b 2\n a\tc  1\r\n", None), ("a->b->2\na->c->1\n", "->"), ("a,b,2\na,c,1\n", ",")],
)
def test_edge_lists(tmp_path, text, separator):
    path = tmp_path / "edges.txt"
    path.write_bytes(text.encode())
    assert pairs_of(readers.edge_list(path, separator=separator)) == {("a", "b"), ("a", "c")}
    assert pairs_of(readers.edge_list(path, separator=separator, value=2, threshold=2)) == {("a", "b")}


def test_edge_list_with_a_header_and_quotes_as_letters(tmp_path):
    path = tmp_path / "edges.tsv"
    path.write_text('from\tto\n"x\ty"\n')
    pairs = readers.edge_list(path, separator="\t", header=True, left="to", right="from")
    assert (pairs_of(pairs), pairs.left_name) == ({('y"', '"x')}, "to")


def test_extreme_classification_keeps_points_without_labels(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("3 4 5\n0,4 0:0.5 3:2\n 1:1\n2 2:1.5\n")
    found = readers.extreme_classification(path)
    expected = np.zeros((3, 5))
    expected[[0, 0, 2], [0, 4, 2]] = 1
    assert (found.pairs.matrix.toarray() == expected).all()
    assert found.features.toarray().tolist() == [[0.5, 0, 0, 2], [0, 1, 0, 0], [0, 0, 1.5, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b c\n", "not three numbers"),
        ("2 4 5\n0 0:1\n", "got 1 points"),
        ("1 4 5\n0 0:1 x\n", "line 2"),
        ("1 4 5\n5 0:1\n", "labels numbered 5 to 5, expected numbers from 0 to 4"),
        ("1 4 5\n1 4:1\n", "features numbered"),
        ("1 5 1000000000\n1 4:1\n", "1,000,000,000 labels in a file of 5 characters"),
        ("1 5 " + "9" * 30 + "\n1 4:1\n", "not three numbers"),
        ("1 4 5\n0 0:nan\n", "line 2"),
        ("1 4 5\n0 0:1e300\n", "line 2"),
        ("1 4 5\n0 1_0:1\n", "line 2"),
        ("1 4 5\n" + "9" * 40 + " 0:1\n", "line 2"),
    ],
)
def test_a_broken_extreme_classification_file_is_named(tmp_path, text, message):
    path = tmp_path / "train.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        readers.extreme_classification(path)


CITEULIKE = {
    "users.dat": "2 0 2\n0\n3 1 2 2\n",
    "words.dat": "2 3:1 0:4\n0\n2 1:2 1:1\n",
    "vocabulary.dat": "xylem\nself-study\nclass&#34\nprefix\n",
}


def folder_of(files, folder, **changed):
    folder.mkdir(exist_ok=True)
    for name, text in {**files, **changed}.items():
        (folder / name).write_text(text)
    return folder


def test_citeulike_has_users_articles_and_words(tmp_path):
    found = readers.citeulike(folder_of(CITEULIKE, tmp_path))
    assert found.pairs.matrix.toarray().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 1]]
    assert found.words.toarray().tolist() == [[4, 0, 0, 1], [0, 0, 0, 0], [0, 3, 0, 0]]
    assert found.vocabulary == ["xylem", "self-study", "class&#34", "prefix"]
    assert (found.pairs.left_name, found.pairs.right_name) == ("user", "article")
    (tmp_path / "words.dat").rename(tmp_path / "mult.dat")
    (tmp_path / "users.dat.xz").write_bytes(lzma.compress((tmp_path / "users.dat").read_bytes()))
    (tmp_path / "users.dat").unlink()
    assert (readers.citeulike(tmp_path).words != found.words).nnz == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("users.dat", "2 0\n", r"line 1 of .*users.dat: '2 0', expected a line 'count article article …'"),
        ("users.dat", "1 x\n", "line 1 of"),
        ("users.dat", "1 0\n\n1 0\n", "line 2 of"),
        ("users.dat", "1 1_0\n", "line 1 of"),
        ("users.dat", "1 3\n", "articles numbered 3 to 3 in line 1 of .*users.dat, expected numbers from 0 to 2"),
        ("users.dat", "1 -1\n", "articles numbered -1"),
        ("users.dat", "0\n", "in which no user has an article"),
        ("words.dat", "1 0\n", r"line 1 of .*words.dat: '1 0', expected a line 'count word:times word:times …'"),
        ("words.dat", "1 0:0\n", "line 1 of"),
        ("words.dat", "1 0:1:1\n", "line 1 of"),
        ("words.dat", "1 4:1\n", "words numbered 4 to 4"),
    ],
)
def test_a_broken_citeulike_file_is_named(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        readers.citeulike(folder_of(CITEULIKE, tmp_path / "set", **{name: text}))


def test_a_folder_without_a_file_says_which_and_what_there_is(tmp_path):
    (tmp_path / "users.dat").write_text("1 0\n")
    with pytest.raises(ValueError, match=r"users.dat.*words.dat.*mult.dat"):
        readers.citeulike(tmp_path)
    with pytest.raises(ValueError, match=r"users.dat.*edges.csv"):
        readers.musae(tmp_path / "users.dat")


MUSAE = {
    "musae_x_edges.csv": "id_1,id_2\n0,7\n7,3\n3,3\n7,0\n",
    "musae_x_features.json": '{"7": [2, 0, 2], "0": [1], "3": []}',
    "musae_x_target.csv": 'id,page_name,page_type\n0,"A, b",x\n3,C,y\n7,D,x\n9,Alone,y\n',
}


def test_graphs_of_musae_have_the_same_nodes_on_both_sides(tmp_path):
    found = readers.musae(folder_of(MUSAE, tmp_path))
    assert found.pairs.left_ids.tolist() == found.pairs.right_ids.tolist() == ["0", "3", "7", "9"]
    assert pairs_of(found.pairs) == {("0", "7"), ("7", "0"), ("7", "3"), ("3", "7")}
    assert (found.pairs.matrix.data == 1).all()
    assert found.pairs.report["self_links"] == 1
    assert found.features.toarray().tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]]
    assert found.nodes["page_name"].to_list() == ["A, b", "C", "D", "Alone"]
    assert pairs_of(readers.musae(tmp_path, directed=True).pairs) == {("0", "7"), ("7", "0"), ("7", "3")}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("musae_x_edges.csv", "a,b\n0,8\n", "unknown ids '8', expected links of the 4 nodes that are listed"),
        ("musae_x_edges.csv", "a,b\n3,3\n", "in which no node is linked to another"),
        ("musae_x_features.json", "[1]", "which holds a list"),
        ("musae_x_features.json", '{"7": [2', "which is no JSON"),
        ("musae_x_features.json", '{"8": [2]}', "with features of '8'"),
        ("musae_x_features.json", '{"7": [-1]}', r"where '7' has \[-1\], expected a list of feature numbers"),
        ("musae_x_features.json", '{"7": [true]}', "where '7' has"),
        ("musae_x_features.json", '{"7": [99999999]}', "with feature 99,999,999, expected numbers below"),
        ("musae_x_target.csv", "id,name\n0,a\n0,b\n", "'0' twice, expected distinct ids"),
    ],
)
def test_a_broken_graph_of_musae_is_named(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message) as error:
        readers.musae(folder_of(MUSAE, tmp_path / "set", **{name: text}))
    assert name in str(error.value)


def test_wikispeedia_has_titles_and_categories(tmp_path):
    (tmp_path / "links.tsv").write_text("# links\n\nCaf%C3%A9_au_lait\tMilk\nMilk\tMilk\nMilk\tCow\n")
    (tmp_path / "categories.tsv").write_text("# about\n\nMilk\tsubject.Food\nMilk\tsubject.Drink\nTea\tsubject.Drink\n")
    found = readers.wikispeedia(tmp_path)
    assert pairs_of(found.pairs) == {("Café au lait", "Milk"), ("Milk", "Cow")}
    assert found.pairs.left_ids.tolist() == ["Café au lait", "Cow", "Milk", "Tea"]
    assert found.features.toarray().tolist() == [[0, 0], [0, 0], [1, 1], [1, 0]]
    assert found.nodes["categories"].to_list() == ["", "", "subject.Drink|subject.Food", "subject.Drink"]
    (tmp_path / "links.tsv").write_text("a\tb\nc\n")
    with pytest.raises(ValueError, match=r"2.*links.tsv.*'c'.*'from<TAB>to'"):
        readers.wikispeedia(tmp_path)


def test_real_sets_with_features_have_their_published_sizes():
    if not (SHARED / "citeulike-t").exists():
        pytest.skip("citeulike-t is not on this machine")
    found = readers.citeulike(SHARED / "citeulike-t")
    assert (found.pairs.shape, len(found.pairs)) == ((7_947, 25_975), 134_860)
    assert found.words.shape == (25_975, len(found.vocabulary)) == (25_975, 20_000)


@pytest.mark.parametrize(
    ("read", "name", "nodes", "pairs", "features"),
    [
        (readers.musae, "facebook-pages", 22_470, 2 * (171_002 - 179), 4_714),
        (readers.wikispeedia, "wikispeedia", 4_601, 119_882 - 110, 129),
    ],
)
def test_real_graphs_have_their_published_sizes(read, name, nodes, pairs, features):
    """Links of a node to itself are left out; three of Wikispeedia's 4,604 articles have neither link nor category."""
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not on this machine")
    found = read(SHARED / name)
    assert (found.pairs.shape, len(found.pairs)) == ((nodes, nodes), pairs)
    assert found.features.shape == (nodes, features)


@pytest.mark.parametrize(
    ("read", "name", "shape", "count"),
    [
        (readers.movielens, "ml-1m", (6038, 3533), 575_281),
        (readers.item_lists, "gowalla/train.txt.xz", (29_858, 40_981), 810_128),
        (readers.thesaurus, "moby-thesaurus/words.txt.xz", (30_259, 102_428), 2_520_214),
        (readers.edge_list, "wikispeedia/links.tsv.xz", (4_587, 4_135), 119_882),
        (
            lambda path: readers.edge_list(path, separator="\t"),
            "npm-deps-2016/pairs.tsv.xz",
            (290_562, 94_388),
            2_333_310,
        ),
    ],
)
def test_real_files_have_their_published_sizes(read, name, shape, count):
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not on this machine")
    pairs = read(SHARED / name)
    assert (pairs.shape, len(pairs)) == (shape, count)
