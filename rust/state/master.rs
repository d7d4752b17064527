//! Masters that are one array: the fp32 parameter itself, a separate fp32 beside a 16-bit weight,
//! or no master at all.

use crate::{
    simd::Simd,
    state::Master,
    stream::{
        BLOCK,
        cursor::Cursor,
        element::{Element, narrow, widen},
    },
};

/// The parameter is the master. In fp32 that is exact; a 16-bit parameter is rounded to nearest, as
/// DeepSpeed's native ABI has it, and updates below half its last place vanish.
pub struct Plain<'a, T>(pub Cursor<'a, T>);

impl<T: Element> Master for Plain<'_, T> {
    type Weight = T;

    #[inline(always)]
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.0.prefetch(at, BLOCK);
    }

    #[inline(always)]
    fn load<S: Simd, const Q: usize>(&self, simd: S, at: usize, count: usize) -> [S::F; Q] {
        widen::<S, T, Q>(simd, self.0.load_unit(simd, at, count))
    }

    #[inline(always)]
    fn streams(&self) -> bool {
        self.0.streams()
    }

    #[inline(always)]
    fn store<S: Simd, const Q: usize, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        master: [S::F; Q],
    ) {
        self.0.store_unit::<S, Q, STREAM>(simd, at, count, narrow::<S, T, Q>(simd, master));
    }

    #[inline(always)]
    fn weights<S: Simd, const Q: usize>(simd: S, master: [S::F; Q]) -> [S::U; Q] {
        narrow::<S, T, Q>(simd, master)
    }
}

/// An fp32 master whose rounded copy is written in the same pass, and never read.
pub struct WithWeightOut<'a, T> {
    master: Cursor<'a, f32>,
    weight: Cursor<'a, T>,
}

impl<'a, T: Element> WithWeightOut<'a, T> {
    /// The master and where its rounded copy goes.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn new(master: Cursor<'a, f32>, weight: Cursor<'a, T>) -> Self {
        assert_eq!(master.len(), weight.len(), "every master has its weight");
        Self { master, weight }
    }
}

impl<T: Element> Master for WithWeightOut<'_, T> {
    type Weight = T;

    #[inline(always)]
    fn len(&self) -> usize {
        self.master.len()
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.master.prefetch(at, BLOCK);
    }

    #[inline(always)]
    fn load<S: Simd, const Q: usize>(&self, simd: S, at: usize, count: usize) -> [S::F; Q] {
        widen::<S, f32, Q>(simd, self.master.load_unit(simd, at, count))
    }

    #[inline(always)]
    fn streams(&self) -> bool {
        self.master.streams() && self.weight.streams()
    }

    #[inline(always)]
    fn store<S: Simd, const Q: usize, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        master: [S::F; Q],
    ) {
        self.master.store_unit::<S, Q, STREAM>(simd, at, count, narrow::<S, f32, Q>(simd, master));
        self.weight.store_unit::<S, Q, STREAM>(simd, at, count, narrow::<S, T, Q>(simd, master));
    }

    #[inline(always)]
    fn weights<S: Simd, const Q: usize>(simd: S, master: [S::F; Q]) -> [S::U; Q] {
        narrow::<S, T, Q>(simd, master)
    }
}

/// A separate fp32 master beside a 16-bit parameter that others may write: an element that is not
/// its rounded master was written by the program, and what it wrote is the master from then on.
pub struct Shadowed<'a, T>(WithWeightOut<'a, T>);

impl<'a, T: Element> Shadowed<'a, T> {
    /// The master and the parameter.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn new(master: Cursor<'a, f32>, weight: Cursor<'a, T>) -> Self {
        Self(WithWeightOut::new(master, weight))
    }
}

impl<T: Element> Master for Shadowed<'_, T> {
    type Weight = T;

    #[inline(always)]
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.0.prefetch(at);
        self.0.weight.prefetch(at, BLOCK);
    }

    #[inline(always)]
    fn load<S: Simd, const Q: usize>(&self, simd: S, at: usize, count: usize) -> [S::F; Q] {
        let mut masters: [S::F; Q] = self.0.load(simd, at, count);
        let weights = self.0.weight.load_unit::<S, Q>(simd, at, count);
        for (master, weight) in masters.iter_mut().zip(weights) {
            let is_ours = simd.eq_u(T::narrow(simd, *master), weight);
            *master = simd.select_f(is_ours, *master, T::widen(simd, weight));
        }
        masters
    }

    #[inline(always)]
    fn streams(&self) -> bool {
        self.0.streams()
    }

    #[inline(always)]
    fn store<S: Simd, const Q: usize, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        master: [S::F; Q],
    ) {
        self.0.store::<S, Q, STREAM>(simd, at, count, master);
    }

    #[inline(always)]
    fn weights<S: Simd, const Q: usize>(simd: S, master: [S::F; Q]) -> [S::U; Q] {
        narrow::<S, T, Q>(simd, master)
    }
}
