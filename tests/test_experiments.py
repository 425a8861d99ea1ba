"""The paper's experiments as files: their numbers are the paper's, a wrong file says what was meant, and they run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")

import gramtower as gt
from gramtower.cli.compare import Experiment, load_experiment
from gramtower.cli.reading import held_out_of, read_pairs
from gramtower.data.datasets import PAPER_SHAPES
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem
from gramtower.model.settings import ModelSettings

FOLDER = Path(__file__).parent.parent / "experiments"
TABLE = {  # Table "Data statistics and the selected hyper-parameters": m, n, |O|, log2 omega, log2 lambda
    "ml1m": (6_037, 3_513, 517_770, -4, 2),
    "ml10m": (69_786, 10_210, 4_505_820, -8, -2),
    "netflix": (478_251, 17_768, 51_228_351, -8, 0),
    "wiki-simple": (85_270, 55_695, 5_478_549, -10, 2),
}
LOG_STEPS = {"ml1m": -25, "ml10m": -23, "netflix": -25, "wiki-simple": -25}  # of sogram and sampling
LINKS = {"moby": (30_259, 102_428, 2_520_214), "wikispeedia": (4_587, 4_135, 119_882)}  # m, n, all pairs
LINKS["npm-deps"] = (290_562, 94_388, 2_333_310)
SHARED = Path(__file__).parents[2] / "shared" / "data"
SEVEN = ["gd", "sogram", "sampling", "newton", "gd-diag", "sogram-diag", "sampling-diag"]


def paper(name):
    return load_experiment(FOLDER / f"{name}.toml")


def test_there_is_a_file_for_each_data_set_of_the_paper_and_three_in_the_place_of_one():
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == sorted([*TABLE, *LINKS])


@pytest.mark.parametrize("name", LINKS)
def test_other_sets_of_links_have_the_settings_of_wiki_simple(name):
    found, model = paper(name), paper("wiki-simple")
    assert (found.settings.model, found.optimizers) == (model.settings.model, model.optimizers)
    m, n, pairs = LINKS[name]
    assert found.shape == (m, n, pairs - round(0.1 * pairs))


@pytest.mark.parametrize("name", [*LINKS, "ml1m"])
def test_real_files_are_read_and_split_as_the_experiment_says(name):
    places = {"moby": "moby-thesaurus/words.txt.xz", "wikispeedia": "wikispeedia/links.tsv.xz"}
    places |= {"npm-deps": "npm-deps-2016/pairs.tsv.xz", "ml1m": "ml-1m"}
    path = SHARED / places[name]
    if not path.exists():
        pytest.skip(f"{path.name} is not on this machine")
    found = paper(name)
    pairs, held_out = held_out_of(read_pairs(path, found.settings.data), found.settings.data, 0, of_all=True)
    if name == "ml1m":  # another split than the paper's, and entities that only its test part has
        assert (pairs.shape, len(pairs), len(held_out)) == ((6038, 3533), 517_753, 57_528)
    else:
        assert (*pairs.shape, len(pairs)) == found.shape


@pytest.mark.parametrize("name", TABLE)
def test_the_numbers_are_those_of_the_table(name):
    *shape, log_omega, log_lambda = TABLE[name]
    found = paper(name)
    assert found.shape == tuple(shape) == PAPER_SHAPES[name]
    assert (math.log2(found.settings.model.omega), math.log2(found.settings.model.l2)) == (log_omega, log_lambda)


@pytest.mark.parametrize("name", [*TABLE, *LINKS])
def test_the_model_is_the_papers(name):
    arguments = paper(name).settings.estimator_arguments()
    assert arguments["hidden"] == (256, 256)
    assert (arguments["dim"], arguments["activation"], arguments["loss"]) == (128, "elu", "logistic")
    assert (arguments["imputed"], arguments["embedding_l2"]) == (-1.0, 0.0)
    pairs = replace(paper(name), shape=(20, 15, 60)).synthetic_pairs()
    model = ModelSettings(**arguments | {"device": "cpu"})
    assert make_problem(model, prepare_data(model, pairs)).weight_arrays == (None, None)
    assert arguments["metric"] == "paper_map@5"
    assert paper(name).settings.data.validation == "0.1"


@pytest.mark.parametrize("name", TABLE)
def test_the_methods_and_their_constants_are_the_papers(name):
    methods = paper(name).optimizers
    assert list(methods) == [*SEVEN, "newton-kron"]
    for searched in ("gd", "newton", "gd-diag"):
        assert (methods[searched]["sufficient_decrease"], methods[searched]["double_every"]) == (1e-4, 5)
    assert (methods["newton"]["cg_tolerance"], methods["newton"]["cg_max_steps"]) == (0.1, 30)
    for drawn in ("sogram", "sampling", "sogram-diag", "sampling-diag"):
        assert methods[drawn]["ratio"] == 0.01
        assert methods[drawn]["step_size"] == (0.01 if "diag" in drawn else 2.0 ** LOG_STEPS[name])
        assert methods[drawn].get("alpha") == (0.1 if "sogram" in drawn else None)
    assert methods["newton-kron"] == {}


@pytest.mark.parametrize("name", [*TABLE, *LINKS])
def test_the_header_has_both_commands(name):
    head = (FOLDER / f"{name}.toml").read_text().split("[data]")[0]
    assert f"--config experiments/{name}.toml --out runs/{name}\n" in head
    assert f"gramtower compare --config experiments/{name}.toml --synthetic --out" in head


@pytest.mark.parametrize("name", TABLE)
def test_a_small_version_runs_with_every_method(name):
    whole = paper(name)
    model = replace(whole.settings.model, dim=4, hidden="6,6")
    small = replace(whole, shape=(90, 70, 900), settings=replace(whole.settings, model=model))
    pairs, held_out = held_out_of(small.synthetic_pairs(), small.settings.data, small.settings.train.seed, of_all=True)
    assert (*pairs.shape, len(pairs)) == small.shape
    assert len(held_out) == 100
    starts = set()
    for method, constants in small.optimizers.items():
        iterations = 20 if "ratio" in constants else 2  # ten steps each for methods that sample
        limits = {"max_iterations": iterations, "time_limit": None, "patience": 99}
        arguments = small.settings.estimator_arguments() | limits | {"device": "cpu"}
        fitted = gt.TwoTower(**arguments, optimizer=method, optimizer_options=constants)
        fitted.fit(pairs, validation=held_out)
        assert fitted.history_[-1].iteration == iterations, method
        assert fitted.history_[-1].value < fitted.history_[0].value, method
        starts.add(fitted.history_[0].value)
    assert len(starts) == 1


def test_generated_pairs_are_the_same_again_and_are_marked():
    small = replace(paper("netflix"), shape=(40, 30, 200))
    one, other = small.synthetic_pairs(), small.synthetic_pairs()
    assert (one.matrix != other.matrix).nnz == 0
    assert len(one) == round(200 / 0.9)
    assert "generated" in small.synthetic_note
    assert "not the data itself" in small.synthetic_note
    assert np.unique(one.matrix.data).tolist() == [1.0]


GOOD = "[data]\nshape = [4, 4, 5]\n[optimizers.gd]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nshape = [4, 4]\n[optimizers.gd]", r"shape.*\[4, 4\]"),
        ("[data]\nshape = [2, 2, 4]\n[optimizers.gd]", "at most 80%"),
        ("[data]\nshape = 'ml1m'\n[optimizers.gd]", "a list of whole numbers"),
        ("[data]\nthresold = 4\n[optimizers.gd]", "unknown key 'thresold' in .data. of .*expected 'threshold'"),
        (GOOD + "[problem]\nomgea = 1", "expected 'omega'"),
        (GOOD + "[problem]\ndim = 1", r"expected 'dim' below \[towers\]"),
        (GOOD + "[run]\noptimizer = 'gd'", "unknown key 'optimizer' in .run."),
        (GOOD + "[run]\ntime-limit = 'long'", r"\[run\] time-limit.*'long'"),
        (GOOD + "[tower]\ndim = 1", r"'tower' at the top of .*expected \[towers\]"),
        (GOOD + "[model]\ndim = 1", "'model' at the top"),
        (
            "[data]\n[optimizers.newton_kron]",
            r"unknown method \[optimizers.newton_kron\].*expected \[optimizers.newton",
        ),
        ("[data]\n[optimizers.gd]\ncg-tolerance = 1", r"option of gd.*'cg_tolerance'"),
        ("[data]\n[optimizers.sogram]\nratoi = 0.1", "did you mean ratio"),
        ("[data]\n[optimizers.sogram]\nratio = 7", r"ratio.*7"),
        ("[data]\noptimizers = 3", "unknown key"),
        ("[run]\nseed = 4", "a table .optimizers.NAME. for each method"),
        ("[data", "not a TOML file"),
    ],
)
def test_a_wrong_file_says_what_was_meant(text, message, tmp_path):
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_experiment(tmp_path / "e.toml")


def test_an_experiment_is_told_from_a_config_of_fit(tmp_path):
    (tmp_path / "a.toml").write_text("[model]\ndim = 3\n[train]\nseed = 1\n")
    (tmp_path / "b.toml").write_text(GOOD)
    assert [load_experiment(tmp_path / name).name for name in ("a.toml", "b.toml")] == [None, "b"]
    assert isinstance(load_experiment(tmp_path / "b.toml"), Experiment)
    (tmp_path / "c.toml").write_text("[optimizers.gd]\n")
    with pytest.raises(ValueError, match=r"c .*shape"):
        load_experiment(tmp_path / "c.toml").synthetic_pairs()
