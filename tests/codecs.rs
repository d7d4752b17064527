//! The codecs of the moments that round: nearness, no bias, decay, and every way in which a coarse
//! code can blow an update up.

mod battery;

use battery::{
    Draw, Held, Layout, MomentsKind, ParamKind, Spread, assert_padding_is_zero, bf16_above,
    bf16_below, cases, code_values, decoded, neighbours, scaled, widest,
};
use proptest::prelude::*;
use stepwell::{
    adam::Hyper,
    simd::isa::Isa,
    state::q8::{self, GROUP},
    stream::element::Dtype,
};

/// Standard errors that a mean may be off by: one test in 500 million fails by chance.
const STANDARD_ERRORS_MAX: f64 = 6.0;
/// A probability is rounded to 16 bits, or to 15 in q8: off by half of the last one at most.
const NOISE_STEP: f64 = 1.0 / (1 << 16) as f64;
/// Roundings of fp32 on the way to a code and back: the scale's reciprocal, its product, and the
/// decoded product.
const ROUNDINGS: f64 = 4.0 / (1 << 24) as f64;

const ROUNDING_CODECS: [MomentsKind; 2] = [MomentsKind::Bf16, MomentsKind::Q8];

fn held(moments: MomentsKind, numel: usize) -> Held {
    Held::zeros(Layout::new(ParamKind::Float32, moments, Dtype::Float32), numel, 0)
}

/// The two values that `value` may be coded to, as element `index` of what was written.
fn brackets(held: &Held, index: usize, value: f32, is_second: bool) -> (f32, f32) {
    if held.layout.moments == MomentsKind::Q8 {
        let scales = if is_second { &held.exp_avg_sq_scales } else { &held.exp_avg_scales };
        let scale = scales.as_ref().expect("q8 has scales").value(index / GROUP);
        let values = &code_values()[usize::from(is_second)];
        let (below, above) = neighbours(values, scale, f64::from(value));
        if is_second && value > 0.0 {
            let smallest = decoded(values[1], scale);
            (below.max(smallest), above.max(smallest))
        } else {
            (below, above)
        }
    } else {
        let (below, above) = (bf16_below(f64::from(value)), bf16_above(f64::from(value)));
        let below =
            if is_second && value > 0.0 { below.max(f32::from_bits(0x1_0000)) } else { below };
        (below, above.min(f32::from_bits(0x7f7f_0000)))
    }
}

proptest! {
    #![proptest_config(cases(128))]

    /// What is decoded is one of the two codes around what was encoded; what lies on a code stays
    /// there.
    #[test]
    fn a_moment_is_at_most_one_code_away(
        numel in 1_usize..200,
        spread in prop_oneof![Just(Spread::Ordinary), Just(Spread::Wide)],
        exponent in -40_i32..20,
        count: u64,
        seed: u64,
    ) {
        let mut draw = Draw::new(seed);
        // Wide groups span all magnitudes; ordinary ones are put anywhere.
        let unit = if spread == Spread::Wide { 1.0 } else { 10_f64.powi(exponent) };
        let mut values = || -> Vec<f32> {
            (0..numel).map(|_| (f64::from(draw.value(spread)) * unit) as f32).collect()
        };
        let exp_avg = values();
        let exp_avg_sq: Vec<f32> = values().into_iter().map(f32::abs).collect();
        for moments in ROUNDING_CODECS {
            for isa in Isa::available() {
                let mut held = held(moments, numel);
                held.write_moments_on(isa, &exp_avg, &exp_avg_sq, count);
                let (first, second) = held.read_moments();
                for (index, (value, got)) in exp_avg.iter().zip(first).enumerate() {
                    let (below, above) = brackets(&held, index, *value, false);
                    prop_assert!(
                        got == below || got == above,
                        "{moments:?}: exp_avg {value:e} became {got:e}, not {below:e} or {above:e}"
                    );
                }
                for (index, (value, got)) in exp_avg_sq.iter().zip(second).enumerate() {
                    let (below, above) = brackets(&held, index, *value, true);
                    prop_assert!(
                        got == below || got == above,
                        "{moments:?}: exp_avg_sq {value:e} became {got:e}, not {below:e} or \
                         {above:e}"
                    );
                    prop_assert!(
                        (got > 0.0) == (*value > 0.0),
                        "{moments:?}: exp_avg_sq {value:e} became {got:e}"
                    );
                }
            }
        }
    }

    /// Padding of the last block is zero after every step, so that no later step reads anything
    /// else.
    #[test]
    fn padding_stays_zero(numel in 1_usize..200, steps in 1_u64..4, seed: u64) {
        for isa in Isa::available() {
            let layout = Layout::new(ParamKind::Float32, MomentsKind::Q8, Dtype::Float32);
            let mut held = Held::random(layout, numel, 0, Spread::Ordinary, seed);
            assert_padding_is_zero(&held);
            for count in 1..=steps {
                held.step(
                    isa,
                    count,
                    &Hyper { weight_decay: 0.1, decoupled: false, ..Hyper::default() },
                );
                assert_padding_is_zero(&held);
            }
        }
    }
}

/// At the values of the codes and right beside them, where a root that is a last place off would
/// find another code: the same code on every ISA.
#[test]
fn codes_change_at_their_values_on_every_isa() {
    let (signed, unsigned) = (&code_values()[0][128..], &code_values()[1]);
    for unit in [1.0, 1e-7, 1e-30, 1e20] {
        // The first of a group sets its scale; the others lie around a code's value under it.
        let places = 256 * (GROUP - 1);
        let numel = places / (GROUP - 1) * GROUP;
        let largest =
            [decoded(signed[signed.len() - 1], unit), decoded(unsigned[unsigned.len() - 1], unit)];
        let mut scales = held(MomentsKind::Q8, GROUP);
        scales.write_moments(&[largest[0]; GROUP], &[largest[1]; GROUP], 0);
        let scale =
            |scales: &Option<battery::Guarded>| scales.as_ref().expect("q8 has scales").value(0);
        let scales = [scale(&scales.exp_avg_scales), scale(&scales.exp_avg_sq_scales)];
        let around = |values: &[f64], largest: f32, scale: f32| -> Vec<f32> {
            let value = |index: usize| {
                let (group, place) = (index / GROUP, index % GROUP);
                let at = decoded(values[group % values.len()], scale);
                let near =
                    f32::from_bits((at.to_bits() + place as u32).saturating_sub(GROUP as u32 / 2));
                if place == 0 { largest } else { near.min(largest) }
            };
            (0..numel).map(value).collect()
        };
        let exp_avg = around(signed, largest[0], scales[0]);
        let exp_avg_sq = around(unsigned, largest[1], scales[1]);
        for count in 0..8 {
            let mut expected = held(MomentsKind::Q8, numel);
            expected.write_moments_on(Isa::SCALAR, &exp_avg, &exp_avg_sq, count);
            for isa in Isa::available() {
                let mut got = held(MomentsKind::Q8, numel);
                got.write_moments_on(isa, &exp_avg, &exp_avg_sq, count);
                got.assert_untouched(&expected, isa.name());
            }
            let (first, second) = expected.read_moments();
            for index in 0..numel {
                for (value, got, is_second) in [
                    (exp_avg[index], first[index], false),
                    (exp_avg_sq[index], second[index], true),
                ] {
                    let (below, above) = brackets(&expected, index, value, is_second);
                    assert!(
                        got == below || got == above,
                        "{value:e} became {got:e}, not {below:e} or {above:e}"
                    );
                }
            }
        }
    }
}

/// Magnitudes that no code reaches have the largest, whichever way the draw goes: what it decodes
/// to has to be finite.
#[test]
fn what_no_code_reaches_has_the_largest() {
    for value in [3.39e38_f32, 3.4022e38, f32::MAX, f32::INFINITY] {
        for isa in Isa::available() {
            for count in 0..32 {
                let mut held = held(MomentsKind::Q8, GROUP);
                held.write_moments_on(isa, &[-value; GROUP], &[value; GROUP], count);
                let (first, second) = held.read_moments();
                let largest = |scales: &Option<battery::Guarded>, moment: usize| {
                    let scale = scales.as_ref().expect("q8 has scales").value(0);
                    decoded(code_values()[moment][255], scale)
                };
                let (first_max, second_max) =
                    (largest(&held.exp_avg_scales, 0), largest(&held.exp_avg_sq_scales, 1));
                assert!(first_max.is_finite() && second_max.is_finite());
                assert_eq!(
                    (first, second),
                    (vec![-first_max; GROUP], vec![second_max; GROUP]),
                    "{value:e} on {}",
                    isa.name()
                );
            }
        }
    }
}

/// Magnitudes within a group: from the largest to 1/1000 of it, so that codes from the largest to
/// the smallest are met.
fn magnitude(index: usize) -> f64 {
    10_f64.powf(-3.0 * (index % GROUP) as f64 / (GROUP - 1) as f64)
}

/// The mean over many draws is the value: for every place in a group, from the smallest normal
/// number to the largest.
#[test]
fn rounding_is_unbiased() {
    const NUMEL: usize = 256 * GROUP;
    let rounds = scaled(192).max(2) as u64;
    for moments in ROUNDING_CODECS {
        for (unit, exponent) in [(0.77, 0), (0.613, -9), (0.9, -30), (0.51, 30), (0.8, 38)] {
            let unit = unit * 10_f64.powi(exponent);
            let exp_avg: Vec<f32> = (0..NUMEL)
                .map(|index| {
                    (if index % 3 == 0 { -unit } else { unit } * magnitude(index % GROUP)) as f32
                })
                .collect();
            // 33 times the group's range in v is left to other tests: below the smallest code there
            // is a bias on purpose.
            let exp_avg_sq: Vec<f32> =
                (0..NUMEL).map(|index| (unit * magnitude(index)) as f32).collect();
            // The signs repeat with the groups of three times 32, so each place is summed on its
            // own.
            let period = 3 * GROUP;
            let mut sums = vec![[0.0_f64; 2]; period];
            let mut draws = vec![0_u32; period];
            let mut held = held(moments, NUMEL);
            for count in 0..rounds {
                held.key = 1000 + count / 3;
                held.write_moments(&exp_avg, &exp_avg_sq, count);
                let (first, second) = held.read_moments();
                for index in 0..NUMEL {
                    sums[index % period][0] += f64::from(first[index]) - f64::from(exp_avg[index]);
                    sums[index % period][1] +=
                        f64::from(second[index]) - f64::from(exp_avg_sq[index]);
                    draws[index % period] += 1;
                }
            }
            for place in 0..period {
                for (is_second, value) in [(false, exp_avg[place]), (true, exp_avg_sq[place])] {
                    let (below, above) = brackets(&held, place, value, is_second);
                    let (value, below, above) =
                        (f64::from(value), f64::from(below), f64::from(above));
                    let draws = f64::from(draws[place]);
                    // Of a number that is one of two.
                    let variance = (value - below).max(0.0) * (above - value).max(0.0);
                    let allowed = STANDARD_ERRORS_MAX * (variance / draws).sqrt()
                        + NOISE_STEP * (above - below)
                        + ROUNDINGS * value.abs();
                    let bias = sums[place][usize::from(is_second)] / draws;
                    assert!(
                        bias.abs() <= allowed,
                        "{moments:?}: {value:e} between {below:e} and {above:e} is off by {bias:e} \
                         on average, allowed {allowed:e}"
                    );
                }
            }
        }
    }
}

/// Whether each of `numel` elements half way between two codes was rounded up.
fn roundings(moments: MomentsKind, numel: usize, key: u64, count: u64) -> (Vec<f64>, Vec<f64>) {
    let mut held = held(moments, numel);
    held.key = key;
    // Half way between codes for q8 with scale 1 (the first of a group sets it), between neighbours
    // for bf16.
    let [signed, unsigned] = code_values();
    let half_way = |values: &[f64], index: usize| {
        let largest = values[values.len() - 1] as f32;
        match (moments, index % GROUP) {
            (MomentsKind::Q8, 0) => largest,
            (MomentsKind::Q8, _) => {
                ((values[values.len() - 40] + values[values.len() - 41]) / 2.0) as f32
            }
            _ => f32::from_bits(0x3f80_8000),
        }
    };
    let exp_avg: Vec<f32> = (0..numel).map(|index| half_way(signed, index)).collect();
    let exp_avg_sq: Vec<f32> = (0..numel).map(|index| half_way(unsigned, index)).collect();
    held.write_moments(&exp_avg, &exp_avg_sq, count);
    let (first, second) = held.read_moments();
    let ups = |got: Vec<f32>, of: &[f32]| -> Vec<f64> {
        let kept = (0..numel).filter(|index| moments != MomentsKind::Q8 || index % GROUP != 0);
        kept.map(|index| if got[index] > of[index] { 1.0 } else { -1.0 }).collect()
    };
    (ups(first, &exp_avg), ups(second, &exp_avg_sq))
}

/// Rounding errors have nothing to do with each other: not of the two moments, of neighbours, of
/// steps, of parameters.
#[test]
fn roundings_are_independent() {
    let numel = scaled(1 << 16).next_multiple_of(GROUP).max(1 << 13);
    let uncorrelated = |what: &str, a: &[f64], b: &[f64]| {
        let sum: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
        let standard_errors = sum / (a.len().min(b.len()) as f64).sqrt();
        assert!(
            standard_errors.abs() <= STANDARD_ERRORS_MAX,
            "{what}: {standard_errors} standard errors"
        );
    };
    for moments in ROUNDING_CODECS {
        let (first, second) = roundings(moments, numel, 1, 1);
        let ones = vec![1.0; first.len()];
        for (name, ups) in [("exp_avg", &first), ("exp_avg_sq", &second)] {
            uncorrelated(
                &format!("{moments:?}: {name} half way goes up as often as down"),
                ups,
                &ones,
            );
            for lag in [1, 2, 16, 31, 32, 64, 1024] {
                uncorrelated(
                    &format!("{moments:?}: {name} {lag} elements apart"),
                    ups,
                    &ups[lag..],
                );
            }
        }
        uncorrelated(&format!("{moments:?}: both moments"), &first, &second);
        for (what, key, count) in [
            ("steps", 1, 2),
            ("far steps", 1, 1 << 32),
            ("parameters", 2, 1),
            ("far keys", 1 << 63, 1),
        ] {
            let (other_first, other_second) = roundings(moments, numel, key, count);
            uncorrelated(&format!("{moments:?}: exp_avg of other {what}"), &first, &other_first);
            uncorrelated(
                &format!("{moments:?}: exp_avg_sq of other {what}"),
                &second,
                &other_second,
            );
        }
        assert_eq!(roundings(moments, numel, 1, 1), (first, second), "the same draw again");
    }
}

/// Steps of gradient 0 after which `exp_avg_sq` is measured: fp32 has .007 left.
const DECAY_STEPS: u64 = 5000;

/// Means of `exp_avg_sq` over each group after [`DECAY_STEPS`], relative to its start.
fn decayed(layout: Layout, groups: usize) -> Vec<f64> {
    let mut held = Held::zeros(layout, groups * GROUP, 0);
    let start: Vec<f32> =
        (0..held.numel).map(|index| 1e-6 * magnitude(index).powf(0.5) as f32).collect();
    held.write_moments(&vec![0.0; held.numel], &start, 0);
    let (_, start) = held.read_moments();
    for count in 1..=DECAY_STEPS {
        held.step(widest(), count, &Hyper::default());
    }
    let (_, end) = held.read_moments();
    let ratios: Vec<f64> =
        end.iter().zip(&start).map(|(end, start)| f64::from(*end) / f64::from(*start)).collect();
    ratios.chunks(GROUP).map(|group| group.iter().sum::<f64>() / GROUP as f64).collect()
}

#[test]
fn exp_avg_sq_decays_as_in_fp32() {
    let of = |moments| Layout::new(ParamKind::Float32, moments, Dtype::Float32);
    let expected = decayed(of(MomentsKind::Float32), 1)[0];
    assert!((0.0065..0.007).contains(&expected), "{expected}");
    for moments in ROUNDING_CODECS {
        let groups = scaled(512).max(32);
        let ratios = decayed(of(moments), groups);
        let count = groups as f64;
        let mean = ratios.iter().sum::<f64>() / count;
        // Groups draw independently; elements of a group share their scale's history.
        let variance =
            ratios.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>() / (count - 1.0);
        let standard_error = (variance / count).sqrt();
        assert!(
            standard_error < 0.03 * expected,
            "{moments:?}: too few groups to tell: {standard_error}"
        );
        assert!(
            (mean - expected).abs() <= STANDARD_ERRORS_MAX * standard_error,
            "{moments:?}: {mean} +- {standard_error} is left, {expected} of fp32"
        );
    }
    // What all this is for: rounded to nearest, it stands still.
    let frozen =
        decayed(Layout::new(ParamKind::PlainBf16, MomentsKind::Nearest16, Dtype::BFloat16), 1)[0];
    assert_eq!(frozen, 1.0);
}

/// Largest and smallest magnitudes, alone in their group and beside each other.
#[test]
fn extremes_stay_nonzero_and_finite() {
    let tiny = [f32::from_bits(1), 1e-42, 1e-40, f32::MIN_POSITIVE, 1e-30, 1e-20];
    let huge =
        [f32::MAX, f32::MAX.next_down(), 0.999 * f32::MAX, 0.99 * f32::MAX, 0.98 * f32::MAX, 3e38];
    for moments in ROUNDING_CODECS {
        for (of, beside) in tiny
            .iter()
            .flat_map(|tiny| [(tiny, 0.0), (tiny, 1.0), (tiny, f32::MAX)])
            .chain(huge.iter().map(|huge| (huge, 0.0)))
        {
            const NUMEL: usize = 64 * GROUP;
            let exp_avg_sq: Vec<f32> =
                (0..NUMEL).map(|index| if index % GROUP == 5 { beside } else { *of }).collect();
            let exp_avg: Vec<f32> = exp_avg_sq.iter().map(|value| -value).collect();
            for count in 0..scaled(16) as u64 {
                let mut held = held(moments, NUMEL);
                held.write_moments(&exp_avg, &exp_avg_sq, count);
                let (first, second) = held.read_moments();
                assert!(
                    first.iter().all(|value| value.is_finite()),
                    "{moments:?}: {of:e} beside {beside:e} overflows"
                );
                for (got, value) in second.iter().zip(&exp_avg_sq) {
                    assert!(got.is_finite(), "{moments:?}: {value:e} overflows");
                    assert!(
                        (*got > 0.0) == (*value > 0.0),
                        "{moments:?}: {value:e} beside {beside:e} became {got:e}"
                    );
                }
            }
        }
    }
}

/// A group of zeros decodes to zeros, and a zero in a group too: what has never had a gradient is
/// never moved.
#[test]
fn zeros_are_exact() {
    for moments in ROUNDING_CODECS {
        let mut held = held(moments, 3 * GROUP);
        held.write_master(&vec![1.0; 3 * GROUP]);
        // The middle group has one element with a gradient, the others have none.
        let alone = GROUP + 7;
        for count in 1..200 {
            held.set_grad(|index| if index == alone { 0.3 } else { 0.0 });
            held.step(widest(), count, &Hyper::default());
        }
        let (first, second) = held.read_moments();
        for (index, master) in held.read_master().into_iter().enumerate() {
            if index == alone {
                assert!(master < 0.9 && first[index] > 0.0 && second[index] > 0.0);
            } else {
                assert_eq!(
                    (master, first[index], second[index]),
                    (1.0, 0.0, 0.0),
                    "{moments:?}: element {index}"
                );
            }
        }
    }
}

/// A NaN or an infinity that is let through (`propagate`) spoils its group of moments at most, and
/// at once only its own weight.
#[test]
fn a_nonfinite_gradient_stays_in_its_group() {
    for moments in ROUNDING_CODECS {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let layout = Layout::new(ParamKind::Float32, moments, Dtype::Float32);
            let mut clean = Held::random(layout, 5 * GROUP, 0, Spread::Ordinary, 3);
            let mut spoilt = clean.moved(0);
            let at = 2 * GROUP + 9;
            spoilt.grad.set_value(at, bad);
            for count in 1..=3 {
                for held in [&mut clean, &mut spoilt] {
                    held.step(widest(), count, &Hyper::default());
                }
                let in_group = |index: usize| match moments {
                    MomentsKind::Q8 => index / GROUP == at / GROUP,
                    _ => index == at,
                };
                let (expected, got) = (clean.read_moments(), spoilt.read_moments());
                let (expected_master, master) = (clean.read_master(), spoilt.read_master());
                for index in (0..5 * GROUP).filter(|&index| !in_group(index)) {
                    assert_eq!(
                        got.0[index].to_bits(),
                        expected.0[index].to_bits(),
                        "exp_avg[{index}]"
                    );
                    assert_eq!(
                        got.1[index].to_bits(),
                        expected.1[index].to_bits(),
                        "exp_avg_sq[{index}]"
                    );
                    assert_eq!(
                        master[index].to_bits(),
                        expected_master[index].to_bits(),
                        "param[{index}]"
                    );
                }
                assert!(master[at].is_nan());
                if count == 1 {
                    for index in (0..5 * GROUP).filter(|&index| index != at) {
                        assert_eq!(
                            master[index].to_bits(),
                            expected_master[index].to_bits(),
                            "param[{index}] at once"
                        );
                    }
                }
                spoilt.grad.set_value(at, 0.1);
                clean.grad.set_value(at, 0.1);
            }
        }
    }
}

/// In bf16, an update within a group may be this many times the largest that fp32 has made in that
/// group so far: by the moments' relative rounding.
const BF16_GROWTH_MAX: f64 = 1.25;
/// In q8, where the group is even.
const Q8_GROWTH_MAX: f64 = 2.0;
/// In q8, where magnitudes spread over 1,000 and more: moments of few codes walk at random between
/// the lowest (5.1 was the most of 512 groups in 2,000 steps). A code of 0 of `exp_avg_sq` would
/// come to thousands.
const Q8_SPREAD_GROWTH_MAX: f64 = 8.0;
/// Beside it: what one code at the smallest scale of `exp_avg`, a normal number, moves at eps
/// alone, with the first step's bias correction of 10. Below that, everything is as good as 0.
const SMALLEST_UPDATE: f64 = 1e-3 * 10.0 * f32::MIN_POSITIVE as f64 / 1e-8;

/// Groups that broke published 8-bit codes: the update never grows beyond fp32's largest.
#[test]
fn updates_stay_bounded_in_odd_groups() {
    /// The gradient of an element at a step, from its place in the group and a normally distributed
    /// number.
    type Gradient = fn(usize, u64, f64) -> f64;
    let patterns: [(&str, f64, Gradient); 8] = [
        ("uniform", Q8_GROWTH_MAX, |_, _, normal| normal),
        ("spread of 1000", Q8_SPREAD_GROWTH_MAX, |place, _, normal| magnitude(place) * normal),
        ("spread of 1000, one sign", Q8_SPREAD_GROWTH_MAX, |place, _, _| magnitude(place)),
        ("spread of 1e6", Q8_SPREAD_GROWTH_MAX, |place, _, normal| {
            magnitude(place).powi(2) * normal
        }),
        ("below 1e-8", Q8_GROWTH_MAX, |place, _, normal| 1e-9 * magnitude(place) * normal),
        ("below 1e-38", Q8_GROWTH_MAX, |place, _, normal| 1e-39 * magnitude(place) * normal),
        ("one of 32", Q8_GROWTH_MAX, |place, _, normal| if place == 3 { normal } else { 0.0 }),
        ("once in 50 steps", Q8_GROWTH_MAX, |place, step, normal| {
            if step % 50 == (place % 7) as u64 { normal } else { 0.0 }
        }),
    ];
    let groups = scaled(16);
    for moments in ROUNDING_CODECS {
        for (name, q8_growth_max, gradient) in patterns {
            let mut full = held(MomentsKind::Float32, groups * GROUP);
            let mut coded = held(moments, groups * GROUP);
            let mut draw = Draw::new(77);
            let mut before = [vec![0.0_f32; groups * GROUP], vec![0.0; groups * GROUP]];
            let (mut growth_max, mut largest_so_far) = (0.0_f64, vec![0.0_f64; groups]);
            for step in 1..=200 {
                let grads: Vec<f32> = (0..groups * GROUP)
                    .map(|index| gradient(index % GROUP, step, draw.normal()) as f32)
                    .collect();
                let mut updates = [vec![], vec![]];
                for (which, held) in [&mut full, &mut coded].into_iter().enumerate() {
                    held.set_grad(|index| grads[index]);
                    held.step(widest(), step, &Hyper::default());
                    let now = held.read_master();
                    updates[which] = now
                        .iter()
                        .zip(&before[which])
                        .map(|(now, before)| (f64::from(*now) - f64::from(*before)).abs())
                        .collect();
                    before[which] = now;
                }
                for group in 0..groups {
                    let largest = |updates: &[f64]| {
                        updates[group * GROUP..(group + 1) * GROUP]
                            .iter()
                            .copied()
                            .fold(0.0, f64::max)
                    };
                    largest_so_far[group] = largest_so_far[group].max(largest(&updates[0]));
                    let got = largest(&updates[1]);
                    assert!(got.is_finite());
                    growth_max = growth_max.max(got / (largest_so_far[group] + SMALLEST_UPDATE));
                }
            }
            let allowed = if moments == MomentsKind::Q8 { q8_growth_max } else { BF16_GROWTH_MAX };
            assert!(
                growth_max <= allowed,
                "{moments:?}, {name}: {growth_max} times fp32's largest update"
            );
        }
    }
}

/// Lengths of codes and scales are those of whole blocks.
#[test]
fn lengths_are_those_of_whole_blocks() {
    for (numel, codes, scales) in
        [(0, 0, 0), (1, 64, 2), (64, 64, 2), (65, 128, 4), (1 << 20, 1 << 20, 1 << 15)]
    {
        assert_eq!((q8::codes_len(numel), q8::scales_len(numel)), (codes, scales));
    }
}
