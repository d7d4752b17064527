//! Several gradients through one pass over a chunk: the updates are applied one after the other, in
//! registers.
//!
//! Master and moments are loaded and decoded once, `S` updates are taken with a gradient and a
//! [`Step`] each (the gradient's own clip coefficient, lr and count), and the result is coded and
//! stored once. Gradients are of any dtype, each of its own.
//!
//! - THR-1 With fp32 moments a pass has the bits of `S` steps (`rust/adam/batch.rs`), for every
//!   master.
//! - THR-2 Coded moments (bf16, q8) are coded once in a pass, with the random bits of the last
//!   count: the pass has the bits of `S` steps with fp32 moments, decoded before the first and
//!   coded after the last. That is one rounding where `S` steps have `S`. With `S = 1` both are the
//!   same.
//! - THR-3 A pass may also write the weight moved on along the last update ([`Predicted`]). The
//!   master and the weight beside it are what they are without.
//! - THR-4 A 16-bit parameter without a master is refused ([`check`]). It is rounded after each
//!   step, which is part of what such a step means, and a pass would round once.
//!
//! Cost per parameter and step with a bf16 gradient, a `split` master and fp32 moments: `(24 + 2S)
//! / S` bytes, of which `12 + 2S` are read; 8 at `S = 4`, where a step of each gradient moves 26.
//! With q8 moments `(12.25 + 2S) / S`. A predicted weight is `2 / S` more, written past the cache.
//! The arithmetic is that of `S` steps, a square root and a division among it, which bound a pass
//! from `S = 4` on (16 cores of a Xeon: `benches/README.md`).
//!
//! The code is compiled once per master, codec and ISA. The number of gradients, their dtypes and
//! the prediction are known when it runs: a loop, and branches that always go the same way.

use super::{Step, batch::with_master, kernel::StepLanes, tensor::AdamTensor};
use crate::{
    error::{Error, Result},
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    state::{
        Master, MomentLanes, Moments,
        chunk::{CHUNK_LEN, Chunk},
        codecs::{MasterKind, MasterVisitor, MomentsVisitor, visit_moments},
        decode_unit,
        dither::Dither,
        encode_unit,
        master::Plain,
    },
    stream::{
        BLOCK,
        cursor::{Cursor, Source, publish},
        element::{Bf16, Dtype, Element, F16, widen},
        view::{Route, View},
    },
};

/// The most gradients of a pass.
pub const GRADS_MAX: usize = 8;

/// The most updates that a weight is moved on by.
pub const AHEAD_MAX: f32 = 16.0;

/// A weight that is moved on by updates that it lacks, while the master stays what it is:
///
/// ```text
/// weight = fma(-(ahead * step_size), exp_avg / denom, master)
/// ```
///
/// `step_size`, `exp_avg` and `denom` are those of the last update of the pass
/// (`rust/adam/kernel.rs`). It is rounded as the master rounds the weight that it writes: to
/// nearest, ties to even; with a split master, ties away from zero. Where `ahead * step_size` is 0
/// it is that weight, with all its bits.
#[derive(Clone, Copy, Debug)]
pub struct Predicted {
    /// Where the chunk's weights go: as many elements as the chunk has, of the dtype that the model
    /// computes with ([`AdamTensor::weight`]).
    pub weight: View,
    /// Updates that it is moved on by, each taken to be as long as the last: 0 to [`AHEAD_MAX`].
    pub ahead: f32,
}

/// Checks that several gradients can be stepped in one pass over this tensor; `index` is for the
/// message.
///
/// # Errors
/// [`Error::Value`] for a 16-bit parameter without a master.
pub fn check(index: usize, tensor: &AdamTensor) -> Result<()> {
    if tensor.layout().master != MasterKind::Plain16 {
        return Ok(());
    }
    Err(Error::value(format!(
        "tensor {index} is a `{}` parameter without a master, expected one with all bits: without, \
         each step is rounded, and several in one pass would be rounded once\nhint: give trailing \
         bits or a master",
        tensor.param.dtype()
    )))
}

/// Steps one chunk of a tensor with the gradients of several updates, in their order, in one pass.
/// All views are the chunk's own: `state` ([`AdamTensor::chunk`]), each gradient and the predicted
/// weight. What is written to another slot than it is read in, and the predicted weight, are
/// published.
///
/// # Safety
/// The memory of the state, the gradients and the predicted weight is alive, and nothing else uses
/// it. What is written is disjoint from all else.
///
/// # Panics
/// For no gradient or more than [`GRADS_MAX`], for a view of another size than the chunk's, for a
/// predicted weight of another dtype or further ahead than [`AHEAD_MAX`], and for what [`check`]
/// refuses.
pub unsafe fn step_chunk_through(
    isa: Isa,
    state: &AdamTensor<Route>,
    updates: &[(View, Step)],
    predicted: Option<Predicted>,
    chunk: Chunk,
) {
    let num_updates = updates.len();
    assert!((1..=GRADS_MAX).contains(&num_updates), "a pass over `{num_updates}` gradients");
    let last = updates[num_updates - 1].1;
    let first = (chunk.index * CHUNK_LEN) as u64;
    // What is behind the last is not used.
    let updates: [Update<'_>; GRADS_MAX] = std::array::from_fn(|index| {
        let (grad, step) = updates[index.min(num_updates - 1)];
        assert_eq!(grad.numel(), state.param.numel(), "every element has its gradient");
        // SAFETY: the caller vouches for the gradient's memory.
        Update { grad: unsafe { GradSource::new(grad) }, step }
    });
    let pass = Pass {
        isa,
        state,
        updates: &updates[..num_updates],
        predicted,
        dither: Dither::new(state.key, last.count, first),
    };
    // SAFETY: passed on from the caller.
    unsafe { with_master(isa, state, pass) };
    if predicted.is_some() || !state.param.is_in_place() {
        publish();
    }
}

/// A gradient, whatever its dtype.
#[derive(Clone, Copy)]
enum GradSource<'a> {
    Float32(Source<'a, f32>),
    BFloat16(Source<'a, Bf16>),
    Float16(Source<'a, F16>),
}

impl GradSource<'_> {
    /// # Safety
    /// As [`View::slice`], of all elements.
    unsafe fn new(grad: View) -> Self {
        let all = 0..grad.numel();
        // SAFETY: passed on from the caller.
        unsafe {
            match grad.dtype() {
                Dtype::BFloat16 => Self::BFloat16(Source::new(grad.slice(all))),
                Dtype::Float16 => Self::Float16(Source::new(grad.slice(all))),
                _ => Self::Float32(Source::new(grad.slice(all))),
            }
        }
    }

    /// The values of `at..at + count`, zeros behind them.
    #[inline(always)]
    fn load<S: Simd, const Q: usize>(&self, simd: S, at: usize, count: usize) -> [S::F; Q] {
        match self {
            Self::Float32(grad) => widen::<S, f32, Q>(simd, grad.load_unit(simd, at, count)),
            Self::BFloat16(grad) => widen::<S, Bf16, Q>(simd, grad.load_unit(simd, at, count)),
            Self::Float16(grad) => widen::<S, F16, Q>(simd, grad.load_unit(simd, at, count)),
        }
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        match self {
            Self::Float32(grad) => grad.prefetch(at, BLOCK),
            Self::BFloat16(grad) => grad.prefetch(at, BLOCK),
            Self::Float16(grad) => grad.prefetch(at, BLOCK),
        }
    }
}

/// A gradient and the step that is taken with it.
#[derive(Clone, Copy)]
struct Update<'a> {
    grad: GradSource<'a>,
    step: Step,
}

/// A pass over a chunk, before it is known what the chunk is held in.
#[derive(Clone, Copy)]
struct Pass<'a> {
    isa: Isa,
    state: &'a AdamTensor<Route>,
    updates: &'a [Update<'a>],
    predicted: Option<Predicted>,
    dither: Dither,
}

impl MasterVisitor for Pass<'_> {
    const REWRITES: bool = true;

    fn visit<P: Master>(self, master: P) {
        let (kind, moments) = (self.state.layout().moments, self.state.moments());
        // SAFETY: the caller of [`step_chunk_through`] vouches for the memory.
        unsafe { visit_moments(kind, moments, WithMaster { pass: self, master }) };
    }

    fn visit_plain16<T: Element>(self, _: Plain<'_, T>) {
        unreachable!("a parameter without a master was refused: `check`")
    }
}

/// A pass over a chunk, before its moments are known.
struct WithMaster<'a, P> {
    pass: Pass<'a>,
    master: P,
}

impl<P: Master> MomentsVisitor for WithMaster<'_, P> {
    fn visit<const Q: usize, M: Moments<Q>>(self, moments: M) {
        let Self { pass: Pass { isa, state, updates, predicted, dither }, master } = self;
        let len = state.param.numel();
        assert_eq!(master.len(), len, "every element has its master");
        assert!(moments.covers(len), "every element has its moments");
        let staged = predicted.map(|Predicted { weight, ahead }| {
            assert!((0.0..=AHEAD_MAX).contains(&ahead), "moved on by `{ahead}` updates");
            assert_eq!((weight.dtype(), weight.numel()), (P::Weight::DTYPE, len), "its weights");
            // SAFETY: the caller of [`step_chunk_through`] vouches for the memory.
            let to = Cursor::write_only(unsafe { weight.slice_mut(0..len) });
            Staged { to, ahead }
        });
        let streams = master.streams() && moments.streams();
        isa.run(UpdateThrough { updates, master, moments, dither, staged, streams });
    }
}

/// Where the predicted weight goes, and how far ahead it is.
struct Staged<'a, T> {
    to: Cursor<'a, T>,
    ahead: f32,
}

/// The kernel of a pass.
struct UpdateThrough<'a, const Q: usize, P: Master, M> {
    updates: &'a [Update<'a>],
    master: P,
    moments: M,
    dither: Dither,
    staged: Option<Staged<'a, P::Weight>>,
    /// All stores of whole units may bypass the cache.
    streams: bool,
}

/// What a pass computes with, in all lanes.
struct Lanes<'a, S: Simd> {
    steps: &'a [StepLanes<S>],
    /// `-(ahead * step_size)` of the last update, where the weight is moved on.
    minus_ahead_size: Option<S::F>,
}

/// All bits of as many elements as a unit has at most.
const ALL_BITS: [u32; BLOCK] = [u32::MAX; BLOCK];

impl<const Q: usize, P: Master, M: Moments<Q>> UpdateThrough<'_, Q, P, M> {
    #[inline(always)]
    fn prefetch(&self, at: usize) {
        for update in self.updates {
            update.grad.prefetch(at);
        }
        self.master.prefetch(at);
        self.moments.prefetch(at);
    }

    /// A unit, or the `count` elements of the tail: all updates, then all stores.
    #[inline(always)]
    fn unit<S: Simd>(&self, simd: S, lanes: &Lanes<'_, S>, at: usize, count: usize) {
        let mut moments = decode_unit::<S, M, Q>(simd, &self.moments.load(simd, at, count));
        let mut master: [S::F; Q] = self.master.load(simd, at, count);
        let mut direction = [simd.splat(0.0); Q];
        let MomentLanes { exp_avg, exp_avg_sq } = &mut moments;
        for (step, update) in lanes.steps.iter().zip(self.updates) {
            let grad: [S::F; Q] = update.grad.load(simd, at, count);
            for i in 0..Q {
                (master[i], exp_avg[i], exp_avg_sq[i], direction[i]) =
                    step.update_along(simd, master[i], grad[i], exp_avg[i], exp_avg_sq[i]);
            }
            // The lanes behind the tail are zeros but for the masters, which are NaNs where eps is
            // 0. With L2 these would reach the moments of the next update, and a scale of q8.
            if count < Q * LANES {
                let kept = Source::new(&ALL_BITS[..count]).load_unit::<S, Q>(simd, 0, count);
                for (master, kept) in master.iter_mut().zip(kept) {
                    *master = simd.of_bits(simd.and(simd.bits(*master), kept));
                }
            }
        }
        if let Some(staged) = &self.staged {
            let mut moved = master;
            if let Some(minus_ahead_size) = lanes.minus_ahead_size {
                for (moved, direction) in moved.iter_mut().zip(direction) {
                    *moved = simd.fma(minus_ahead_size, direction, *moved);
                }
            }
            let weights = P::weights::<S, Q>(simd, moved);
            if staged.to.streams() && count == Q * LANES {
                staged.to.store_unit::<S, Q, true>(simd, at, count, weights);
            } else {
                staged.to.store_unit::<S, Q, false>(simd, at, count, weights);
            }
        }
        let measure = M::measure(simd, &mut moments);
        let noise = if M::STOCHASTIC { self.dither.lanes(simd, at) } else { [simd.splat_u(0); Q] };
        let (first, second) = encode_unit::<S, M, Q>(simd, &moments, &measure, &noise);
        if self.streams && count == Q * LANES {
            self.master.store::<S, Q, true>(simd, at, count, master);
            self.moments.store::<S, true>(simd, at, count, first, second, measure);
        } else {
            self.master.store::<S, Q, false>(simd, at, count, master);
            self.moments.store::<S, false>(simd, at, count, first, second, measure);
        }
    }
}

impl<const Q: usize, P: Master, M: Moments<Q>> Kernel for UpdateThrough<'_, Q, P, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let last = &self.updates[self.updates.len() - 1].step;
        let mut steps = [StepLanes::new(simd, last); GRADS_MAX];
        for (lanes, update) in steps.iter_mut().zip(self.updates) {
            *lanes = StepLanes::new(simd, &update.step);
        }
        let steps = &steps[..self.updates.len()];
        let minus_ahead_size = match &self.staged {
            Some(Staged { ahead, .. }) if *ahead != 0.0 && ahead * last.step_size != 0.0 => {
                Some(simd.splat(-(ahead * last.step_size)))
            }
            _ => None,
        };
        let lanes = Lanes { steps, minus_ahead_size };
        // The tail goes through the same code: a branch for each load and store beside arithmetic
        // that takes longer, where a body of its own would be compiled once more.
        let (len, unit) = (self.master.len(), Q * LANES);
        for at in (0..len).step_by(unit) {
            if at.is_multiple_of(BLOCK) {
                self.prefetch(at);
            }
            self.unit(simd, &lanes, at, (len - at).min(unit));
        }
    }
}
