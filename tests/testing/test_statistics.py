"""The statistics of the kit: against scipy, and by what they find and do not find."""

import pytest
import torch
from scipy import stats

from pyg_scale.testing import statistics


def draw(weight: torch.Tensor, k: int, times: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weight.expand(times, -1), k, generator=generator)


def count(picks: torch.Tensor, d: int) -> torch.Tensor:
    return torch.bincount(picks.reshape(-1), minlength=d)


@pytest.mark.parametrize(("x", "dof"), [(0.5, 1), (3.0, 2), (40.0, 15), (40000.0, 39999), (0, 3)])
def test_tail(x, dof):
    assert statistics.chi_square_tail(x, dof) == pytest.approx(stats.chi2.sf(x, dof), rel=1e-6)


def test_multinomial_is_pearsons():
    counts = torch.tensor([30, 22, 48, 11])
    assert statistics.multinomial(counts) == pytest.approx(stats.chisquare(counts).pvalue)
    weight = torch.tensor([3.0, 2, 5, 1])
    expected = (counts.sum() * weight / weight.sum()).numpy()
    assert statistics.multinomial(counts, weight) == pytest.approx(
        stats.chisquare(counts, expected).pvalue, rel=1e-5
    )


def test_what_has_no_probability_must_not_be_drawn():
    weight = torch.tensor([1.0, 1.0, 0.0])
    assert statistics.multinomial(torch.tensor([500, 500, 1]), weight) == 0.0
    assert statistics.multinomial(torch.tensor([500, 510, 0]), weight) > 0.1


def test_inclusion_rejects_as_often_as_it_says():
    d, k, times = 16, 10, 300
    p = [
        statistics.inclusion(count(draw(torch.ones(d), k, 500, seed), d), k)
        for seed in range(times)
    ]
    uniform = stats.kstest(p, "uniform").pvalue
    assert uniform > 1e-3  # p-values of a correct sampler are uniform; uncorrected they are near 1


def test_inclusion_finds_a_bias_that_the_uncorrected_test_does_not():
    d, k = 16, 10
    weight = torch.ones(d)
    weight[3] = 1.15
    counts = count(draw(weight, k, 4000), d)
    assert statistics.inclusion(counts, k) < 1e-4
    assert statistics.multinomial(counts) > 1e-4


def test_inclusion_of_groups():
    d, k = 60, 20
    picks = draw(torch.ones(d), k, 2000)
    size = torch.tensor([10, 20, 30])
    group = torch.repeat_interleave(torch.arange(3), size)
    counts = torch.bincount(group[picks].view(-1), minlength=3)
    assert statistics.inclusion(counts, k, size) > 1e-3
    counts[0] += 1200
    counts[1] -= 1200
    assert statistics.inclusion(counts, k, size) < 1e-6


def test_inclusion_when_all_are_taken():
    assert statistics.inclusion(torch.tensor([7, 7, 7]), 3) == 1.0
    assert statistics.inclusion(torch.tensor([8, 7, 6]), 3) == 0.0


def test_combinations_find_what_inclusion_cannot():
    # Neighbours are only ever drawn as (0, 1), (2, 3) or (4, 5): each as often as the others.
    first = 2 * torch.randint(0, 3, (3000, 1), generator=torch.Generator().manual_seed(0))
    picks = torch.cat([first + 1, first], dim=1)
    assert statistics.inclusion(count(picks, 6), 2) > 1e-3
    assert statistics.combinations(picks, 6) < 1e-12
    assert statistics.combinations(draw(torch.ones(6), 2, 3000), 6) > 1e-3


def test_successive_is_what_torch_draws():
    weight = torch.tensor([1.0, 2.0, 4.0, 0.0, 3.0])
    probability = statistics.successive(weight, 2)
    assert sum(probability.values()) == pytest.approx(1.0)
    assert probability[0, 3] == 0.0
    picks = draw(weight, 2, 20_000)
    assert statistics.combinations(picks, 5, probability) > 1e-3
    assert statistics.combinations(picks, 5, statistics.successive(weight.sqrt(), 2)) < 1e-12


def test_independent():
    a = torch.randint(0, 4, (4000,), generator=torch.Generator().manual_seed(0))
    b = torch.randint(0, 4, (4000,), generator=torch.Generator().manual_seed(1))
    assert statistics.independent(torch.stack([a, b], dim=1), (4, 4)) > 1e-3
    assert statistics.independent(torch.stack([a, (a + 1) % 4], dim=1), (4, 4)) < 1e-12


def test_require_corrects_for_the_number_of_tests():
    statistics.require(2e-4, "one")
    statistics.require({"a": 5e-5, "b": 0.3}, "two")  # 1e-4 / 2
    with pytest.raises(AssertionError, match=r"^two \(a\): a correct sampler"):
        statistics.require({"a": 4e-5, "b": 0.3}, "two")
    with pytest.raises(AssertionError, match="^one: "):
        statistics.require(9e-5, "one")
