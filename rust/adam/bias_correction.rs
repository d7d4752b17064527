//! The bias correction `1 - beta^count`, with the same bits on every machine.
//!
//! The power is computed by squaring, in pairs of doubles whose sum is the number (Dekker, 1971),
//! with additions and multiplications alone. A libm's `pow` may round the last bit another way than
//! the next libm's, and does: glibc's is not the nearest double in one of some 2,000 cases.
//!
//! Error: with `beta <= 1 - 2^-20` the pair is within 2^-70 of the exact power, relative. So its
//! sum, rounded, is the double nearest to the exact power, unless that lies within 2^-17 of the
//! distance of two doubles from the middle between them. The correction is then within `2^-54`
//! (half the last place of a power of at least a half), plus half its own last place, of the exact
//! one. Python's `1 - beta**step`, which torch uses, has the same error.

/// A number as the sum of two doubles; the second is at most half the last place of the first.
#[derive(Clone, Copy)]
struct Pair(f64, f64);

/// `1 - beta^count`, for `0 <= beta < 1`.
pub(crate) fn bias_correction(beta: f64, count: u64) -> f64 {
    1.0 - power(beta, count)
}

/// `base^exponent`, rounded once, for `0 <= base <= 1`.
fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (Pair(1.0, 0.0), Pair(base, 0.0));
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = product(result, square);
        }
        square = product(square, square);
        exponent >>= 1;
    }
    result.0
}

/// The product, within 2^-101 relative, but where parts of it underflow: such a power is nothing
/// beside 1.
fn product(a: Pair, b: Pair) -> Pair {
    let high = a.0 * b.0;
    let low = rounding_error(a.0, b.0, high) + (a.0 * b.1 + a.1 * b.0);
    let sum = high + low;
    Pair(sum, low - (sum - high))
}

/// `a * b - product`, exactly, where `product` is `a * b` rounded (Dekker's product).
fn rounding_error(a: f64, b: f64, product: f64) -> f64 {
    let ((a_high, a_low), (b_high, b_low)) = (halves(a), halves(b));
    ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
}

/// The upper 26 bits of a mantissa, and the rest, whose products have no rounding (Veltkamp).
fn halves(value: f64) -> (f64, f64) {
    const SPLITTER: f64 = (1 << 27) as f64 + 1.0;
    let scaled = SPLITTER * value;
    let high = scaled - (scaled - value);
    (high, value - high)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exact powers of the double nearest to each base, rounded to the nearest double, computed
    /// with integers of any length. glibc's `pow` misses three of them.
    #[test]
    fn powers_are_the_nearest_doubles() {
        for (base, exponent, bits) in [
            (0.9, 1, 0x3fec_cccc_cccc_cccd),
            (0.9, 2, 0x3fe9_eb85_1eb8_51ec),
            (0.9, 10, 0x3fd6_50bf_6043_2fd9),
            (0.9, 1000, 0x366f_ee74_13da_c341),
            (0.95, 12345, 0x06d6_0d40_51fd_7ad2),
            (0.999, 1, 0x3fef_f7ce_d916_872b),
            (0.999, 2, 0x3fef_ef9f_cb0c_026d),
            (0.999, 1000, 0x3fd7_8852_6411_ed72),
            (0.999, 100_000, 0x36e9_4074_7bb8_5395),
            (0.98, 777, 0x3e84_7084_649e_f580),
            (0.999_999_9, 100_000, 0x3fef_ae7c_fce8_4b33),
            (0.692_46, 11, 0x3f91_f94f_73ae_12bc),
            (0.912_85, 53, 0x3f80_4fcb_8677_7a44),
            (0.861_2, 70, 0x3efe_0d74_36bd_aa7f),
            (0.0, 3, 0),
            (0.5, 1, 0x3fe0_0000_0000_0000),
        ] {
            let power = power(base, exponent);
            assert_eq!(power.to_bits(), bits, "{base}^{exponent} is {power:e}");
        }
    }

    #[test]
    fn corrections_are_defined_for_every_count() {
        for beta in [0.0, 0.5, 0.9, 0.999, 1.0 - f64::EPSILON / 2.0] {
            assert_eq!(bias_correction(beta, 1), 1.0 - beta);
            let counts = (0..64).map(|exponent| 1 << exponent).chain([u64::MAX]);
            let corrections: Vec<f64> = counts.map(|count| bias_correction(beta, count)).collect();
            assert!(corrections.is_sorted() && corrections[0] > 0.0, "{beta}: {corrections:?}");
            assert!(corrections.iter().all(|&correction| correction <= 1.0));
        }
        assert_eq!(bias_correction(0.9, u64::MAX), 1.0);
    }
}
