//! Squared norm and finite check of a gradient in one read.
//!
//! Invariants: the squared norm is summed in double precision over blocks of [`NORM_BLOCK`]
//! elements counted from the parameter's first, lane by lane within a block, then block by block in
//! order: the result depends on neither chunks, alignment, ISA nor threads. The largest magnitude
//! is compared as integer bits, where NaN > infinity > every finite value, so the finite check
//! costs one instruction. Reads the gradient once, writes 8 B per block.

use crate::{
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    stream::{BLOCK, cursor::Source, element::Element},
};

/// Elements of a summation block; divides every chunk.
pub const NORM_BLOCK: usize = 4096;

#[inline(always)]
fn larger<S: Simd, G: Element>(
    simd: S,
    largest: S::U,
    grad: &Source<'_, G>,
    at: usize,
    count: usize,
) -> S::U {
    simd.max_u(largest, simd.magnitude(G::widen(simd, grad.load(simd, at, count))))
}

struct Magnitude<'a, G>(Source<'a, G>);

impl<G: Element> Kernel for Magnitude<'_, G> {
    type Output = u32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u32 {
        let Self(grad) = self;
        // Several places at once: memory answers more requests than one sequence keeps in flight.
        const PLACES: usize = 4;
        let mut largest = [simd.splat_u(0); PLACES];
        let part = grad.len() / (PLACES * BLOCK) * BLOCK;
        for from in (0..part).step_by(BLOCK) {
            for (place, largest) in largest.iter_mut().enumerate() {
                let at = place * part + from;
                grad.prefetch(at, BLOCK);
                for at in (at..at + BLOCK).step_by(LANES) {
                    *largest = larger(simd, *largest, &grad, at, LANES);
                }
            }
        }
        let mut at = PLACES * part;
        while at < grad.len() {
            let count = (grad.len() - at).min(LANES);
            largest[0] = larger(simd, largest[0], &grad, at, count);
            at += count;
        }
        let pairs = [simd.max_u(largest[0], largest[1]), simd.max_u(largest[2], largest[3])];
        simd.max_lane(simd.max_u(pairs[0], pairs[1]))
    }
}

struct MagnitudeAndNorm<'a, 'b, G> {
    grad: Source<'a, G>,
    sums: &'b mut [f64],
}

impl<G: Element> Kernel for MagnitudeAndNorm<'_, '_, G> {
    type Output = u32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u32 {
        let Self { grad, sums } = self;
        let mut largest = simd.splat_u(0);
        for (block, sum) in sums.iter_mut().enumerate() {
            let (mut at, end) = (block * NORM_BLOCK, ((block + 1) * NORM_BLOCK).min(grad.len()));
            let mut squares = simd.zero_sums();
            while at < end {
                grad.prefetch(at, LANES);
                let count = (end - at).min(LANES);
                let values = G::widen(simd, grad.load(simd, at, count));
                largest = simd.max_u(largest, simd.magnitude(values));
                squares = simd.add_squares(squares, values);
                at += count;
            }
            *sum = simd.sums(squares).into_iter().sum();
        }
        simd.max_lane(largest)
    }
}

/// The bits of the largest magnitude: at least those of infinity where a value is not finite.
pub fn magnitude<G: Element>(isa: Isa, grad: &[G]) -> u32 {
    isa.run(Magnitude(Source::new(grad)))
}

/// As [`magnitude`], and the sum of squares of each block of [`NORM_BLOCK`] elements into `sums`.
///
/// # Panics
/// If `sums` has not one place for each block.
pub fn magnitude_and_norm<G: Element>(isa: Isa, grad: &[G], sums: &mut [f64]) -> u32 {
    assert_eq!(sums.len(), grad.len().div_ceil(NORM_BLOCK), "every block has its sum");
    isa.run(MagnitudeAndNorm { grad: Source::new(grad), sums })
}
