//! Where the result of a step may lie: the float64 oracle, widened by the roundings of fp32, then
//! seen through the codec.

use stepwell::{
    adam::{
        Hyper,
        reference::{self, Element64},
    },
    simd::isa::Isa,
    state::q8::{self, GROUP},
    stream::element::{Bf16, Dtype, F16},
};

use super::{Held, Layout, MomentsKind, ParamKind};

/// Half a unit in the last place of fp32, relative: the error of one rounding.
const ROUNDING: f64 = 1.0 / (1_u64 << 24) as f64;
/// Half the smallest subnormal: the error of one rounding whose result is subnormal.
const SUBNORMAL_ROUNDING: f64 = f64::from_bits((1023 - 150) << 52);

/// `exp_avg`: grad_scale, its product, L2's coefficient and fma, 1 - beta1, its product, beta1, the
/// fma.
const EXP_AVG_ROUNDINGS: f64 = 8.0;
/// `exp_avg_sq`: the gradient's four, squared, so twice; 1 - beta2, two products, beta2, the fma.
const EXP_AVG_SQ_ROUNDINGS: f64 = 13.0;
/// The denominator beside `exp_avg_sq`'s: square root, its coefficient, eps, the fma.
const DENOM_ROUNDINGS: f64 = 4.0;
/// The update beside numerator and denominator: the quotient, and the step size.
const UPDATE_ROUNDINGS: f64 = 2.0;
/// The decayed master: the coefficient and the product.
const DECAY_ROUNDINGS: f64 = 2.0;

const Q8_OF_FLOAT32: Layout =
    Layout { param: ParamKind::Float32, moments: MomentsKind::Q8, grad: Dtype::Float32 };
/// 1 in bf16.
const ONE: Bf16 = Bf16(0x3f80);

/// What a number before its codec must be.
#[derive(Clone, Copy, Debug)]
enum Bound {
    NaN,
    /// Between the two; infinite where a bound lies beyond the largest finite number.
    Within(f64, f64),
    /// fp32 overflows or underflows on the way where float64 does not.
    Anything,
}

impl Bound {
    fn around(value: f64, tolerance: f64) -> Self {
        if value.is_nan() {
            Self::NaN
        } else if value.is_infinite() {
            Self::Within(value, value)
        } else {
            Self::Within(value - tolerance, value + tolerance)
        }
    }

    /// Whether `got` lies within, its bounds having passed through `low` and `high`.
    fn holds(self, got: f32, low: impl Fn(f64) -> f32, high: impl Fn(f64) -> f32) -> bool {
        match self {
            Self::NaN => got.is_nan(),
            Self::Within(least, most) => low(least) <= got && got <= high(most),
            Self::Anything => true,
        }
    }
}

/// The largest fp32 number that is not above `value`.
fn round_down(value: f64) -> f32 {
    let rounded = value as f32;
    if f64::from(rounded) > value { rounded.next_down() } else { rounded }
}

/// The smallest fp32 number that is not below `value`.
fn round_up(value: f64) -> f32 {
    -round_down(-value)
}

/// The results of one element's step: master, `exp_avg`, `exp_avg_sq`.
fn bounds(hyper: &Hyper, count: u64, before: Element64, grad: f64) -> [Bound; 3] {
    let after = reference::update(hyper, count, before, grad);
    let (beta1, beta2) = hyper.betas;

    let l2 = if hyper.decoupled { 0.0 } else { hyper.weight_decay };
    // Sums of magnitudes: what the errors are relative to, where terms of opposite signs cancel.
    let scaled = (grad * hyper.grad_scale).abs();
    let grad_terms = scaled + if l2 == 0.0 { 0.0 } else { (l2 * before.master).abs() };
    let exp_avg_terms = beta1 * before.exp_avg.abs() + (1.0 - beta1) * grad_terms;
    let exp_avg_sq_terms = beta2 * before.exp_avg_sq + (1.0 - beta2) * grad_terms * grad_terms;
    let overflows = |value: f64| value.is_finite() && value > 0.99 * f64::from(f32::MAX);
    if overflows(scaled) || overflows(grad_terms) {
        return [Bound::Anything; 3];
    }
    let exp_avg_error = EXP_AVG_ROUNDINGS * ROUNDING * exp_avg_terms + 4.0 * SUBNORMAL_ROUNDING;
    let exp_avg_sq_error = EXP_AVG_SQ_ROUNDINGS * ROUNDING * exp_avg_sq_terms
        + 6.0 * SUBNORMAL_ROUNDING * (1.0 + grad_terms);
    let exp_avg = Bound::around(after.exp_avg, exp_avg_error);
    let exp_avg_sq = Bound::around(after.exp_avg_sq, exp_avg_sq_error);

    let keep = if hyper.decoupled { 1.0 - hyper.lr * hyper.weight_decay } else { 1.0 };
    let kept = before.master * keep;
    let kept_error = DECAY_ROUNDINGS * ROUNDING * kept.abs() + SUBNORMAL_ROUNDING;
    let correction =
        |beta: f64| if hyper.bias_correction { 1.0 - beta.powf(count as f64) } else { 1.0 };
    let denom = |exp_avg_sq: f64, error: f64| {
        (exp_avg_sq.max(0.0) / correction(beta2)).sqrt() * (1.0 + error) + hyper.eps * (1.0 + error)
    };
    let denom_least = denom(after.exp_avg_sq - exp_avg_sq_error, -DENOM_ROUNDINGS * ROUNDING);
    let quotient_most = if denom_least == 0.0 { 0.0 } else { exp_avg_terms / denom_least };
    if overflows(quotient_most)
        || overflows(kept.abs())
        || (denom_least == 0.0 && after.exp_avg.is_finite())
    {
        return [Bound::Anything, exp_avg, exp_avg_sq];
    }
    if !(after.exp_avg.is_finite() && after.exp_avg_sq.is_finite() && after.master.is_finite()) {
        if overflows(exp_avg_sq_terms) {
            return [Bound::Anything, exp_avg, exp_avg_sq];
        }
        // NaNs and infinities follow from the same operations; with an infinite denominator only
        // the decay is left.
        return [
            Bound::around(after.master, kept_error + ROUNDING * kept.abs()),
            exp_avg,
            exp_avg_sq,
        ];
    }
    let denom_most = if overflows(exp_avg_sq_terms) {
        f64::INFINITY
    } else {
        denom(after.exp_avg_sq + exp_avg_sq_error, DENOM_ROUNDINGS * ROUNDING)
    };
    let step_size = hyper.lr / correction(beta1);
    let numerators = [after.exp_avg - exp_avg_error, after.exp_avg + exp_avg_error];
    let updates = numerators
        .map(|numerator| [numerator / denom_least, numerator / denom_most])
        .into_iter()
        .flatten();
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for update in updates.map(|quotient| step_size * quotient) {
        let error = UPDATE_ROUNDINGS * ROUNDING * update.abs()
            + SUBNORMAL_ROUNDING * (1.0 + step_size.abs());
        least = least.min(kept - kept_error - update - error);
        most = most.max(kept + kept_error - update + error);
    }
    let last = ROUNDING * least.abs().max(most.abs()) + SUBNORMAL_ROUNDING;
    [Bound::Within(least - last, most + last), exp_avg, exp_avg_sq]
}

fn bf16_to_nearest(value: f32) -> f32 {
    half::bf16::from_f32(value).to_f32()
}

fn f16_to_nearest(value: f32) -> f32 {
    half::f16::from_f32(value).to_f32()
}

/// The bf16 number at or below `value` that a finite number may be rounded to.
pub(crate) fn bf16_below(value: f64) -> f32 {
    if value.is_infinite() {
        return value as f32;
    }
    let value = round_down(value).max(-f32::from_bits(0x7f7f_0000));
    let toward_zero = f32::from_bits(value.to_bits() & 0xffff_0000);
    let below = if toward_zero > value {
        f32::from_bits(toward_zero.to_bits() + 0x1_0000)
    } else {
        toward_zero
    };
    below.min(f32::from_bits(0x7f7f_0000))
}

/// As [`bf16_below`], at or above; infinite only beyond the largest fp32 number.
pub(crate) fn bf16_above(value: f64) -> f32 {
    if value > f64::from(f32::MAX) { f32::INFINITY } else { -bf16_below(-value) }
}

/// The values of the codes of `exp_avg` and of `exp_avg_sq` at scale 1, in order, as
/// `rust/state/q8.rs` defines them.
pub(crate) fn code_values() -> &'static [Vec<f64>; 2] {
    static VALUES: std::sync::OnceLock<[Vec<f64>; 2]> = std::sync::OnceLock::new();
    VALUES.get_or_init(|| {
        // R doubles `doublings` times from a power of two to the next, and is linear in between.
        let r = |x: f64, doublings: f64, at_one: f64| {
            let exponent = x.log2().floor();
            let doublings_done = doublings * (exponent + x / exponent.exp2() - 1.0);
            at_one * doublings_done.floor().exp2() * (1.0 + doublings_done.fract())
        };
        let exp_avg: Vec<f64> =
            (0..=127).map(|code| r(f64::from(code) + 2.0, 2.0, 1.0 / 8.0) - 0.5).collect();
        let exp_avg_sq =
            (0..=255).map(|code| r(f64::from(code) + 3.0, 4.0, 1.0 / 128.0) - 0.5).collect();
        [
            exp_avg.iter().rev().map(|value| -value).chain(exp_avg.iter().copied()).collect(),
            exp_avg_sq,
        ]
    })
}

/// What a code stands for at this scale, rounded once.
pub(crate) fn decoded(value: f64, scale: f32) -> f32 {
    (value * f64::from(scale)) as f32
}

/// The decoded values at or below and at or above `value`, at this scale; the outermost ones beyond
/// them.
pub(crate) fn neighbours(values: &[f64], scale: f32, value: f64) -> (f32, f32) {
    let at = |index: usize| decoded(values[index], scale);
    let above = values
        .partition_point(|&code| f64::from(decoded(code, scale)) < value)
        .min(values.len() - 1);
    let is_at_most = f64::from(at(above)) <= value;
    (at(if is_at_most { above } else { above.saturating_sub(1) }), at(above))
}

/// Checks one decoded moment of a group against where it may lie: at most one code away.
fn q8_holds(bound: Bound, got: f32, scale: f32, values: &[f64], is_second: bool) -> bool {
    match bound {
        Bound::Within(least, most) if least.abs().max(most.abs()) <= f64::from(f32::MAX) => {
            let low = neighbours(values, scale, least).0;
            let mut high = neighbours(values, scale, most).1;
            if is_second && most > 0.0 {
                // What is not 0 gets at least the smallest code.
                high = high.max(decoded(values[1], scale));
            }
            let vanishes = is_second && least > 0.0 && got == 0.0;
            got.is_finite() && low <= got && got <= high && !vanishes
        }
        // fp32 overflows, and the group's scale is saturated or a NaN.
        _ => true,
    }
}

/// Fails where `after` is not what an exact step leads to from `before`, to within the roundings of
/// fp32 and the codec.
pub(crate) fn assert_follows(
    before: &mut Held,
    after: &mut Held,
    isa: Isa,
    count: u64,
    hyper: &Hyper,
) {
    let layout = before.layout;
    let (masters, (firsts, seconds)) = (before.read_master(), before.read_moments());
    let (masters_after, (firsts_after, seconds_after)) =
        (after.read_master(), after.read_moments());
    let mut groups = vec![[Vec::new(), Vec::new()]; before.numel.div_ceil(GROUP)];
    for index in 0..before.numel {
        let element = Element64 {
            master: f64::from(masters[index]),
            exp_avg: f64::from(firsts[index]),
            exp_avg_sq: f64::from(seconds[index]),
        };
        let grad = before.grad.value(index);
        let [master, first, second] = bounds(hyper, count, element, f64::from(grad));
        groups[index / GROUP][0].push(first);
        groups[index / GROUP][1].push(second);
        let check = |name: &str, holds: bool, got: f32, bound: Bound| {
            assert!(
                holds,
                "{layout:?} on {}: {name}[{index}] is {got:e}, expected {bound:?} \
                 after step {count} of {element:?} \
                 with gradient {grad:e} and {hyper:?}",
                isa.name()
            );
        };

        let got = masters_after[index];
        let holds = match layout.param {
            ParamKind::PlainBf16 => master.holds(
                got,
                |x| bf16_to_nearest(round_down(x)),
                |x| bf16_to_nearest(round_up(x)),
            ),
            ParamKind::PlainF16 => master.holds(
                got,
                |x| f16_to_nearest(round_down(x)),
                |x| f16_to_nearest(round_up(x)),
            ),
            _ => master.holds(got, round_down, round_up),
        };
        check("master", holds, got, master);
        assert_weights_follow(after, index, got);

        for (name, got, bound, is_second) in [
            ("exp_avg", firsts_after[index], first, false),
            ("exp_avg_sq", seconds_after[index], second, true),
        ] {
            let holds = match (layout.moments, layout.param) {
                (MomentsKind::Float32, _) => bound.holds(got, round_down, round_up),
                (MomentsKind::Nearest16, ParamKind::PlainBf16) => bound.holds(
                    got,
                    |x| bf16_to_nearest(round_down(x)),
                    |x| bf16_to_nearest(round_up(x)),
                ),
                (MomentsKind::Nearest16, _) => bound.holds(
                    got,
                    |x| f16_to_nearest(round_down(x)),
                    |x| f16_to_nearest(round_up(x)),
                ),
                (MomentsKind::Bf16, _) => {
                    let smallest = f32::from_bits(0x1_0000);
                    let low = |x: f64| {
                        if is_second && x > 0.0 {
                            bf16_below(x).max(smallest)
                        } else {
                            bf16_below(x)
                        }
                    };
                    bound.holds(got, low, bf16_above)
                }
                (MomentsKind::Q8, _) => {
                    let scales =
                        if is_second { &after.exp_avg_sq_scales } else { &after.exp_avg_scales };
                    let scale = scales.as_ref().expect("q8 has scales").value(index / GROUP);
                    scale.is_nan()
                        || q8_holds(
                            bound,
                            got,
                            scale,
                            &code_values()[usize::from(is_second)],
                            is_second,
                        )
                }
            };
            check(name, holds, got, bound);
        }
    }
    if layout.moments == MomentsKind::Q8 {
        for (index, [firsts, seconds]) in groups.iter().enumerate() {
            assert_scale_follows(&after.exp_avg_scales, index, firsts, 0);
            assert_scale_follows(&after.exp_avg_sq_scales, index, seconds, 1);
        }
        assert_padding_is_zero(after);
    }
}

/// A scale reaches every element, without waste; a NaN is a NaN's.
fn assert_scale_follows(
    scales: &Option<super::Guarded>,
    group: usize,
    bounds: &[Bound],
    moment: usize,
) {
    let scale = f64::from(scales.as_ref().expect("q8 has scales").value(group));
    let code_max = code_values()[moment][255];
    if bounds.iter().any(|bound| matches!(bound, Bound::Anything)) {
        return;
    }
    let has_nan = bounds.iter().any(|bound| matches!(bound, Bound::NaN));
    assert_eq!(scale.is_nan(), has_nan, "scale {group} is {scale:e} for {bounds:?}");
    if has_nan {
        return;
    }
    let (mut least, mut most) = (0_f64, 0_f64);
    for bound in bounds {
        let &Bound::Within(low, high) = bound else { unreachable!("sorted out above") };
        let (low_magnitude, high_magnitude) =
            (low.abs().min(high.abs()), low.abs().max(high.abs()));
        least = least.max(if low < 0.0 && high > 0.0 { 0.0 } else { low_magnitude });
        most = most.max(high_magnitude);
    }
    // Rounded up to bf16, so at most 2^-7 larger than the largest magnitude needs, and never
    // subnormal.
    let smallest = f64::from(f32::MIN_POSITIVE);
    let largest = f64::from(f32::MAX);
    // Near the largest finite number, the largest code must not decode to infinity.
    let reached = least.min(largest * (1.0 - SCALE_WASTE_MAX)) * (1.0 - 4.0 * ROUNDING);
    assert!(scale * code_max >= reached, "scale {group}: {scale:e} for {bounds:?}");
    let roomy = (most.min(largest) / code_max * (1.0 + SCALE_WASTE_MAX)).max(smallest);
    assert!(scale <= roomy, "scale {group}: {scale:e} for {bounds:?}");
    assert!(scale == 0.0 || scale >= smallest, "scale {group}: {scale:e} for {bounds:?}");
    assert!(least == 0.0 || scale > 0.0, "scale {group}: {scale:e} for {bounds:?}");
}

/// Rounding up to bf16.
const SCALE_WASTE_MAX: f64 = 1.0 / 127.0;

/// Everything that a step writes beside the master is the master, rounded.
fn assert_weights_follow(after: &Held, index: usize, master: f32) {
    match after.layout.param {
        ParamKind::Float32WithBf16 | ParamKind::Float32WithF16 => {
            let weight = after.weight_out.as_ref().expect("the layout has it");
            let rounded = if weight.dtype() == Dtype::BFloat16 {
                bf16_to_nearest(master)
            } else {
                f16_to_nearest(master)
            };
            assert!(
                super::is_same(weight.value(index), rounded),
                "weight_out[{index}] of {master:e}"
            );
        }
        ParamKind::Shadowed => {
            let weight = after.param.slice::<F16>()[index].0;
            assert_eq!(
                weight,
                if master.is_nan() { F16::NAN.0 } else { half::f16::from_f32(master).to_bits() }
            );
        }
        ParamKind::Split => {
            let high = after.param.slice::<Bf16>()[index].0;
            let expected = if master.is_nan() {
                Bf16::NAN.0
            } else {
                ((master.to_bits() + 0x8000) >> 16) as u16
            };
            assert_eq!(high, expected, "the high half of {master:e}");
        }
        _ => {}
    }
}

/// The codes and scales of the last block behind the last element are zeros, which the next step
/// relies on. (Codes under a scale that is a NaN mean nothing.)
pub(crate) fn assert_padding_is_zero(held: &Held) {
    let moments =
        [(&held.exp_avg, &held.exp_avg_scales), (&held.exp_avg_sq, &held.exp_avg_sq_scales)];
    // A parameter that fills its last block, with the same codes; under a scale of 1 no code but 0
    // decodes to 0.
    let mut filled = Held::zeros(Q8_OF_FLOAT32, q8::codes_len(held.numel), 0);
    for (codes, of) in [(&mut filled.exp_avg, moments[0].0), (&mut filled.exp_avg_sq, moments[1].0)]
    {
        codes.payload_mut().copy_from_slice(of.payload());
    }
    for scales in [&mut filled.exp_avg_scales, &mut filled.exp_avg_sq_scales] {
        scales.as_mut().expect("q8 has scales").slice_mut::<Bf16>().fill(ONE);
    }
    let (first, second) = filled.read_moments();
    for (decoded, (_, scales)) in [first, second].iter().zip(moments) {
        let scales = scales.as_ref().expect("q8 has scales");
        let holds = |index: usize| decoded[index] == 0.0 || scales.value(index / GROUP).is_nan();
        assert!((held.numel..decoded.len()).all(holds), "codes behind element {}", held.numel);
        let behind = &scales.slice::<Bf16>()[held.numel.div_ceil(GROUP)..];
        assert!(behind.iter().all(|scale| scale.0 == 0), "scales behind element {}", held.numel);
    }
}
