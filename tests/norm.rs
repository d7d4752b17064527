//! Squared norm and finite check: against float64, and bit for bit however the gradient is cut,
//! placed and shared out.

mod battery;

use battery::{
    Draw, Guarded, SPECIALS, Spread, cases, flushing_subnormals, is_hurried, pool, pool_of, widest,
};
use proptest::prelude::*;
use stepwell::{
    Error,
    grads::{
        norm::{NORM_BLOCK, magnitude, magnitude_and_norm},
        stats::{GradStats, grad_stats},
    },
    host::pool::Pool,
    simd::{LANES, isa::Isa},
    state::chunk::CHUNK_LEN,
    stream::{
        BLOCK,
        element::{Bf16, Dtype, F16},
    },
};

/// Summation in float64 in another order: 2^-53 for each of at most 2^17 terms, all of one sign.
const SUM_ERROR: f64 = 1.5e-11;

const GRADS: [Dtype; 3] = [Dtype::Float32, Dtype::BFloat16, Dtype::Float16];

fn grad(dtype: Dtype, values: &[f32], offset: usize) -> Guarded {
    let mut grad = Guarded::zeros(dtype, values.len(), offset);
    for (index, value) in values.iter().enumerate() {
        grad.set_value(index, *value);
    }
    grad
}

/// The bits of the largest magnitude without and with sums, and the sums.
fn measure(isa: Isa, grad: &Guarded, range: std::ops::Range<usize>) -> (u32, u32, Vec<f64>) {
    let mut sums = vec![f64::NAN; range.len().div_ceil(NORM_BLOCK)];
    let (alone, with_sums) = match grad.dtype() {
        Dtype::BFloat16 => {
            let grad = &grad.slice::<Bf16>()[range];
            (magnitude(isa, grad), magnitude_and_norm(isa, grad, &mut sums))
        }
        Dtype::Float16 => {
            let grad = &grad.slice::<F16>()[range];
            (magnitude(isa, grad), magnitude_and_norm(isa, grad, &mut sums))
        }
        _ => {
            let grad = &grad.slice::<f32>()[range];
            (magnitude(isa, grad), magnitude_and_norm(isa, grad, &mut sums))
        }
    };
    (alone, with_sums, sums)
}

fn stats(pool: &Pool, isa: Isa, grads: &mut [Guarded], with_norm: bool) -> GradStats {
    let views: Vec<_> = grads.iter_mut().map(Guarded::view).collect();
    // SAFETY: the views are of memory that the caller lends.
    unsafe { grad_stats(pool, isa, &views, with_norm) }.expect("gradients")
}

fn sizes() -> impl Strategy<Value = usize> {
    let around = |at: usize| at - 1..=at + 1;
    prop_oneof![
        6 => 0_usize..=130,
        1 => around(LANES),
        1 => around(BLOCK),
        1 => around(NORM_BLOCK),
        1 => around(2 * NORM_BLOCK + BLOCK),
    ]
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn follows_float64_on_every_isa(
        numel in sizes(),
        offset in 0_usize..64,
        is_wide: bool,
        seed: u64,
    ) {
        let mut draw = Draw::new(seed);
        let values = draw.values(if is_wide { Spread::Wide } else { Spread::Ordinary }, numel);
        for dtype in GRADS {
            let aligned = grad(dtype, &values, 0);
            let stored = aligned.values();
            let mut first = None;
            for isa in Isa::available() {
                let moved = aligned.moved(offset);
                let got = measure(isa, &moved, 0..numel);
                moved.assert_guards("grad");
                let bits = |sums: &[f64]| sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>();
                let first = first.get_or_insert_with(|| got.clone());
                prop_assert_eq!(
                    (got.0, got.1, bits(&got.2)),
                    (first.0, first.1, bits(&first.2)),
                    "{} on {}",
                    dtype,
                    isa.name()
                );
            }
            let (alone, with_sums, sums) = first.expect("scalar is always there");
            let largest = stored.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0);
            prop_assert_eq!((alone, with_sums), (largest, largest));
            for (sum, block) in sums.iter().zip(stored.chunks(NORM_BLOCK)) {
                let expected: f64 = block.iter().map(|value| f64::from(*value).powi(2)).sum();
                prop_assert!(
                    *sum == expected || (sum - expected).abs() <= SUM_ERROR * expected,
                    "{} against {}",
                    sum,
                    expected
                );
            }
        }
    }

    /// Cut at any multiple of the summation block, the blocks' sums are the same bits.
    #[test]
    fn cuts_at_blocks_do_not_show(numel in 1_usize..5 * NORM_BLOCK, cut in 0_usize..5, seed: u64) {
        let values = Draw::new(seed).values(Spread::Wide, numel);
        let cut = (cut * NORM_BLOCK).min(numel / NORM_BLOCK * NORM_BLOCK);
        for dtype in GRADS {
            let grad = grad(dtype, &values, 0);
            let whole = measure(widest(), &grad, 0..numel);
            let (first, second) =
                (measure(widest(), &grad, 0..cut), measure(widest(), &grad, cut..numel));
            prop_assert_eq!(whole.0, first.0.max(second.0));
            let cut: Vec<u64> = first.2.iter().chain(&second.2).map(|sum| sum.to_bits()).collect();
            prop_assert_eq!(whole.2.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>(), cut);
        }
    }
}

/// At every position of a small gradient: a NaN counts more than an infinity, and that more than
/// any finite number.
#[test]
fn one_bad_value_is_seen_wherever_it_is() {
    let bad = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)];
    for isa in Isa::available() {
        for dtype in GRADS {
            for at in (0..150).step_by(if is_hurried() { 11 } else { 1 }) {
                for bad in bad {
                    let mut values = vec![f32::MAX; 150];
                    values[at] = bad;
                    if dtype == Dtype::Float16 {
                        values
                            .iter_mut()
                            .filter(|value| **value == f32::MAX)
                            .for_each(|value| *value = 65504.0);
                    }
                    if dtype == Dtype::BFloat16 {
                        values
                            .iter_mut()
                            .filter(|value| **value == f32::MAX)
                            .for_each(|value| *value = 3e38);
                    }
                    let grad = grad(dtype, &values, 1);
                    let (alone, with_sums, sums) = measure(isa, &grad, 0..150);
                    for bits in [alone, with_sums] {
                        let got = f32::from_bits(bits);
                        assert!(
                            if bad.is_nan() { got.is_nan() } else { got == f32::INFINITY },
                            "{bad} at {at} gave {got}"
                        );
                    }
                    assert!(!sums[0].is_finite());
                }
            }
        }
    }
}

/// Several gradients on pools of every size: the same bits, the first bad one named.
#[test]
fn threads_do_not_show() {
    let sizes = if is_hurried() {
        [NORM_BLOCK + 5, 0, 1, 300]
    } else {
        [3 * CHUNK_LEN + 77, 0, CHUNK_LEN, 300]
    };
    let mut draw = Draw::new(4);
    let mut grads: Vec<Guarded> = sizes
        .iter()
        .zip([Dtype::Float32, Dtype::BFloat16, Dtype::Float16, Dtype::BFloat16])
        .map(|(&numel, dtype)| grad(dtype, &draw.values(Spread::Ordinary, numel), numel % 7))
        .collect();
    let expected = stats(pool(), Isa::SCALAR, &mut grads, true);
    let values: Vec<f32> = grads.iter().flat_map(Guarded::values).collect();
    let sq_norm: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    assert!(
        (expected.sq_norm - sq_norm).abs() <= SUM_ERROR * sq_norm,
        "{} against {sq_norm}",
        expected.sq_norm
    );
    assert_eq!(expected.absmax, values.iter().fold(0.0, |largest, value| value.abs().max(largest)));
    assert_eq!(expected.first_nonfinite, None);
    for threads in [1, 2, 3, 7] {
        let pool = pool_of(threads);
        for isa in Isa::available() {
            let got = stats(&pool, isa, &mut grads, true);
            assert_eq!(
                got.sq_norm.to_bits(),
                expected.sq_norm.to_bits(),
                "{threads} threads, {}",
                isa.name()
            );
            assert_eq!(got, expected);
            let without = stats(&pool, isa, &mut grads, false);
            assert!(without.sq_norm.is_nan());
            assert_eq!(
                (without.absmax, without.first_nonfinite),
                (got.absmax, got.first_nonfinite)
            );
        }
    }
    for (bad, at) in [(3, 299), (2, 0), (0, sizes[0] - 1), (0, 0)] {
        let value = if bad == 2 { f32::NAN } else { f32::INFINITY };
        let last = grads[bad].numel() - 1;
        grads[bad].set_value(at.min(last), value);
        for with_norm in [true, false] {
            let got = stats(&pool_of(3), widest(), &mut grads, with_norm);
            assert_eq!(got.first_nonfinite, Some(bad));
            assert!(if bad == 3 { got.absmax == f32::INFINITY } else { got.absmax.is_nan() });
        }
    }
}

#[test]
fn nothing_has_no_norm() {
    for mut grads in [vec![], vec![grad(Dtype::Float32, &[], 0)]] {
        let got = stats(pool(), widest(), &mut grads, true);
        assert_eq!(got, GradStats { sq_norm: 0.0, absmax: 0.0, first_nonfinite: None });
    }
}

/// Squares of subnormals are far from subnormal in float64, and flush-to-zero must not take them
/// away.
#[test]
fn flush_to_zero_does_not_show() {
    let values: Vec<f32> = SPECIALS
        .into_iter()
        .map(f32::from_bits)
        .filter(|value| value.is_finite())
        .map(|value| value.clamp(-1e-38, 1e-38))
        .collect();
    for dtype in GRADS {
        for isa in Isa::available() {
            let mut grads = [grad(dtype, &values, 0)];
            let expected = stats(pool(), isa, &mut grads, true);
            assert!(dtype == Dtype::Float16 || (expected.sq_norm > 0.0 && expected.absmax > 0.0));
            flushing_subnormals(|| assert_eq!(stats(pool(), isa, &mut grads, true), expected));
        }
    }
}

#[test]
fn other_dtypes_are_refused() {
    for dtype in Dtype::ALL.into_iter().filter(|dtype| !GRADS.contains(dtype)) {
        let mut grads = [Guarded::zeros(Dtype::Float32, 4, 0), Guarded::zeros(dtype, 4, 0)];
        let views = [grads[0].view(), grads[1].view()];
        // SAFETY: the views are of this function's buffers.
        let error =
            unsafe { grad_stats(pool(), widest(), &views, true) }.expect_err("not a gradient");
        assert!(
            matches!(&error, Error::Value(message) if message.contains(dtype.name())),
            "{error}"
        );
    }
}
