//! Moments that are one array each: fp32, 16-bit rounded to nearest, bf16 rounded stochastically.

use std::marker::PhantomData;

use crate::{
    simd::Simd,
    state::{
        MomentLanes, Moments,
        part::{HeldMoments, Part},
    },
    stream::{
        BLOCK,
        cursor::Cursor,
        element::{Bf16, Element},
        view::Route,
    },
};

/// `exp_avg` and `exp_avg_sq` in `T`, one array each, rounded as `R` has it.
pub struct Arrays<'a, T, R> {
    exp_avg: Cursor<'a, T>,
    exp_avg_sq: Cursor<'a, T>,
    rounding: PhantomData<R>,
}

/// Rounded to nearest: exact for fp32; for 16-bit types what DeepSpeed's native ABI does, where
/// `exp_avg_sq` stops decaying at the usual beta2.
pub type Nearest<'a, T> = Arrays<'a, T, ToNearest>;

/// bf16, rounded stochastically: unbiased, so that `exp_avg_sq` decays as fp32's does, in
/// expectation.
pub type Stochastic<'a> = Arrays<'a, Bf16, Randomly>;

/// See [`Nearest`].
pub struct ToNearest;

/// See [`Stochastic`].
pub struct Randomly;

/// How 16 values of both moments become elements.
pub trait Rounding<T> {
    /// Whether it draws on its noise.
    const STOCHASTIC: bool;
    /// The elements, in the low bits of their lanes; `noise` is 32 random bits for each.
    fn round<S: Simd>(simd: S, exp_avg: S::F, exp_avg_sq: S::F, noise: S::U) -> (S::U, S::U);
}

impl<T: Element> Rounding<T> for ToNearest {
    const STOCHASTIC: bool = false;

    #[inline(always)]
    fn round<S: Simd>(simd: S, exp_avg: S::F, exp_avg_sq: S::F, _noise: S::U) -> (S::U, S::U) {
        (T::narrow(simd, exp_avg), T::narrow(simd, exp_avg_sq))
    }
}

impl Rounding<Bf16> for Randomly {
    const STOCHASTIC: bool = true;

    #[inline(always)]
    fn round<S: Simd>(simd: S, exp_avg: S::F, exp_avg_sq: S::F, noise: S::U) -> (S::U, S::U) {
        let first = round_stochastically(simd, exp_avg, simd.and(noise, simd.splat_u(0xffff)));
        let second = round_stochastically(simd, exp_avg_sq, simd.shr::<16>(noise));
        // Below the smallest subnormal a positive value may round to 0: it keeps the smallest
        // instead.
        let is_positive = simd.lt(simd.splat(0.0), exp_avg_sq);
        (first, simd.select(is_positive, simd.max_u(second, simd.splat_u(1)), second))
    }
}

/// One of the two neighbours of `value`, the nearer one more often: up with the probability that
/// `noise`, 16 uniform bits, is at least what is missing. A finite value stays finite.
#[inline(always)]
fn round_stochastically<S: Simd>(simd: S, values: S::F, noise: S::U) -> S::U {
    let magnitude = simd.magnitude(values);
    let infinity = simd.splat_u(0x7f80_0000);
    let rounded = simd.shr::<16>(simd.add_u(magnitude, noise));
    let finite = simd.min_u(rounded, simd.splat_u(u32::from(Bf16::MAX.0)));
    let nan = simd.splat_u(u32::from(Bf16::NAN.0));
    let not_finite = simd.select(simd.gt_u(magnitude, infinity), nan, simd.splat_u(0x7f80));
    let rounded = simd.select(simd.gt_u(infinity, magnitude), finite, not_finite);
    let sign = simd.and(simd.shr::<16>(simd.bits(values)), simd.splat_u(0x8000));
    simd.or(rounded, sign)
}

impl<'a, T: Element, R> Arrays<'a, T, R> {
    /// Both moments.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn new(exp_avg: Cursor<'a, T>, exp_avg_sq: Cursor<'a, T>) -> Self {
        assert_eq!(exp_avg.len(), exp_avg_sq.len(), "every element has both moments");
        Self { exp_avg, exp_avg_sq, rounding: PhantomData }
    }
}

impl<T: Element, R> HeldMoments for Arrays<'_, T, R> {
    const PARTS: &'static [Part] =
        &[Part::per_element("exp_avg", T::DTYPE), Part::per_element("exp_avg_sq", T::DTYPE)];

    unsafe fn open(routes: &[Route]) -> Self {
        // SAFETY: passed on from the caller.
        unsafe { Self::new(routes[0].cursor(), routes[1].cursor()) }
    }
}

impl<T: Element, R: Rounding<T>> Moments<1> for Arrays<'_, T, R> {
    const STOCHASTIC: bool = R::STOCHASTIC;
    type Held<S: Simd> = [S::U; 2];
    type Measure<S: Simd> = ();

    fn covers(&self, len: usize) -> bool {
        self.exp_avg.len() == len
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.exp_avg.prefetch(at, BLOCK);
        self.exp_avg_sq.prefetch(at, BLOCK);
    }

    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, at: usize, count: usize) -> [S::U; 2] {
        [self.exp_avg.load(simd, at, count), self.exp_avg_sq.load(simd, at, count)]
    }

    #[inline(always)]
    fn decode<S: Simd, const I: usize>(
        simd: S,
        &[exp_avg, exp_avg_sq]: &[S::U; 2],
    ) -> (S::F, S::F) {
        (T::widen(simd, exp_avg), T::widen(simd, exp_avg_sq))
    }

    #[inline(always)]
    fn measure<S: Simd>(_simd: S, _moments: &mut MomentLanes<S, 1>) {}

    #[inline(always)]
    fn encode<S: Simd, const I: usize>(
        simd: S,
        (): &(),
        exp_avg: S::F,
        exp_avg_sq: S::F,
        noise: S::U,
    ) -> (S::U, S::U) {
        R::round(simd, exp_avg, exp_avg_sq, noise)
    }

    #[inline(always)]
    fn streams(&self) -> bool {
        self.exp_avg.streams() && self.exp_avg_sq.streams()
    }

    #[inline(always)]
    fn expect_unit(&self, at: usize) {
        self.exp_avg.expect_unit::<1>(at);
        self.exp_avg_sq.expect_unit::<1>(at);
    }

    #[inline(always)]
    fn store<S: Simd, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        exp_avg: [S::U; 1],
        exp_avg_sq: [S::U; 1],
        (): (),
    ) {
        self.exp_avg.store_unit::<S, 1, STREAM>(simd, at, count, exp_avg);
        self.exp_avg_sq.store_unit::<S, 1, STREAM>(simd, at, count, exp_avg_sq);
    }
}
