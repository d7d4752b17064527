//! A tensor's state in fp32 and back: what state dicts, checkpoints and consolidation tools
//! exchange.

use super::{
    batch::{in_place, with_master},
    tensor::AdamTensor,
};
use crate::{
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    state::{
        Master, Moments,
        chunk::Chunk,
        codecs::{
            MasterKind, MasterVisitor, MomentsKind, MomentsVisitor, visit_master, visit_moments,
            visit_plain16_moments,
        },
        convert::{ReadMaster, ReadMoments, WriteMaster, WriteMoments},
        dither::Dither,
        split::Fingerprint,
    },
    stream::{
        cursor::{Cursor, Source},
        element::{Bf16, Dtype, F16},
        view::{Route, View, check_disjoint},
    },
};

/// fp32 values that a state is decoded into or encoded from; each may be left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct StateViews {
    /// The master.
    pub master: Option<View>,
    /// Both moments.
    pub moments: Option<(View, View)>,
}

impl StateViews {
    fn check(&self, numel: usize) -> Result<()> {
        let named = [
            ("master", self.master),
            ("exp_avg", self.moments.map(|(exp_avg, _)| exp_avg)),
            ("exp_avg_sq", self.moments.map(|(_, exp_avg_sq)| exp_avg_sq)),
        ];
        named.into_iter().try_for_each(|(name, view)| {
            view.map_or(Ok(()), |view| view.expect(name, &[Dtype::Float32], numel))
        })
    }

    fn views(&self) -> impl Iterator<Item = (&'static str, View)> {
        [self.master, self.moments.map(|moments| moments.0), self.moments.map(|moments| moments.1)]
            .into_iter()
            .flatten()
            .map(|view| ("the fp32 values", view))
    }
}

/// Decodes a tensor's state into fp32.
///
/// # Safety
/// As [`super::batch::step`].
///
/// # Errors
/// [`crate::Error::Value`] for views of another dtype or size, or that overlap.
pub unsafe fn read_state(pool: &Pool, isa: Isa, tensor: &AdamTensor, to: StateViews) -> Result<()> {
    to.check(tensor.param.numel())?;
    check_disjoint(to.views(), tensor.written())?;
    let chunks = Chunk::all([tensor.param.numel()].into_iter());
    pool.run(chunks.len(), &|task| {
        let range = chunks[task].range(tensor.param.numel());
        let state = in_place(&tensor.chunk(chunks[task].index));
        // SAFETY: the caller vouches for the memory; chunks are disjoint.
        unsafe {
            if let Some(view) = to.master {
                let to = Cursor::in_place(view.slice_mut::<f32>(range.clone()));
                with_master(isa, &state, ReadInto { isa, to });
            }
            if let Some((exp_avg, exp_avg_sq)) = to.moments {
                let exp_avg = Cursor::in_place(exp_avg.slice_mut::<f32>(range.clone()));
                let exp_avg_sq = Cursor::in_place(exp_avg_sq.slice_mut::<f32>(range.clone()));
                with_moments(&state, ReadMomentsInto { isa, exp_avg, exp_avg_sq });
            }
        }
    });
    Ok(())
}

/// Encodes fp32 values into a tensor's state; a master also writes the 16-bit parameter. `count`
/// seeds the rounding.
///
/// # Safety
/// As [`super::batch::step`].
///
/// # Errors
/// [`crate::Error::Value`] for views of another dtype or size, or that overlap.
pub unsafe fn write_state(
    pool: &Pool,
    isa: Isa,
    tensor: &AdamTensor,
    count: u64,
    from: StateViews,
) -> Result<()> {
    from.check(tensor.param.numel())?;
    check_disjoint(tensor.written(), from.views())?;
    let chunks = Chunk::all([tensor.param.numel()].into_iter());
    pool.run(chunks.len(), &|task| {
        let range = chunks[task].range(tensor.param.numel());
        let state = in_place(&tensor.chunk(chunks[task].index));
        // SAFETY: the caller vouches for the memory; chunks are disjoint.
        unsafe {
            if let Some(view) = from.master {
                let from = Source::new(view.slice::<f32>(range.clone()));
                with_master(isa, &state, WriteFrom { isa, from });
            }
            if let Some((exp_avg, exp_avg_sq)) = from.moments {
                let dither = Dither::new(tensor.key, count, range.start as u64);
                let exp_avg = Source::new(exp_avg.slice::<f32>(range.clone()));
                let exp_avg_sq = Source::new(exp_avg_sq.slice::<f32>(range.clone()));
                with_moments(&state, WriteMomentsFrom { isa, exp_avg, exp_avg_sq, dither });
            }
        }
    });
    Ok(())
}

/// Takes the fingerprints of a split parameter whose trailing bits belong to it, as they do where
/// it was stepped without fingerprints. Reads 2 B per parameter.
///
/// # Safety
/// As [`super::batch::step`].
///
/// # Errors
/// [`crate::Error::Value`] for a tensor without fingerprints.
pub unsafe fn take_fingerprints(pool: &Pool, isa: Isa, tensor: &AdamTensor) -> Result<()> {
    let Some(fingerprints) = tensor.fingerprints() else {
        return Err(Error::value(
            "the tensor has no fingerprints, expected a bfloat16 parameter with them",
        ));
    };
    let chunks = Chunk::all([tensor.param.numel()].into_iter());
    pool.run(chunks.len(), &|task| {
        let chunk = chunks[task];
        // SAFETY: the caller vouches for the memory; chunks are disjoint.
        unsafe {
            let high = tensor.param.slice::<Bf16>(chunk.range(tensor.param.numel()));
            fingerprints.slice_mut::<i32>(task..task + 1)[0] =
                isa.run(Fingerprint(high)).cast_signed();
        }
    });
    Ok(())
}

/// Writes a 16-bit weight to a master, of as many elements.
///
/// # Safety
/// As [`super::batch::step`].
pub(crate) unsafe fn widen(isa: Isa, weight: View, master: View) {
    let route = Route { from: weight, to: weight };
    // SAFETY: passed on from the caller.
    unsafe {
        let to = Cursor::in_place(master.slice_mut::<f32>(0..master.numel()));
        visit_master(isa, MasterKind::Plain16, route, &[], None, ReadInto { isa, to });
    }
}

/// Writes fp32 masters, rounded as a step rounds them, to a 16-bit weight of as many elements.
///
/// # Safety
/// As [`super::batch::step`].
pub(crate) unsafe fn round(isa: Isa, master: View, weight: View) {
    let route = Route { from: weight, to: weight };
    // SAFETY: passed on from the caller.
    unsafe {
        let from = Source::new(master.slice::<f32>(0..master.numel()));
        visit_master(isa, MasterKind::Plain16, route, &[], None, WriteFrom { isa, from });
    }
}

pub(super) struct ReadInto<'a> {
    pub(super) isa: Isa,
    pub(super) to: Cursor<'a, f32>,
}

impl MasterVisitor for ReadInto<'_> {
    const REWRITES: bool = false;

    fn visit<P: Master>(self, master: P) {
        self.isa.run(ReadMaster { master, to: self.to });
    }
}

struct WriteFrom<'a> {
    isa: Isa,
    from: Source<'a, f32>,
}

impl MasterVisitor for WriteFrom<'_> {
    const REWRITES: bool = true;

    fn visit<P: Master>(self, master: P) {
        self.isa.run(WriteMaster { from: self.from, master });
    }
}

pub(super) struct ReadMomentsInto<'a> {
    pub(super) isa: Isa,
    pub(super) exp_avg: Cursor<'a, f32>,
    pub(super) exp_avg_sq: Cursor<'a, f32>,
}

impl MomentsVisitor for ReadMomentsInto<'_> {
    fn visit<const Q: usize, M: Moments<Q>>(self, moments: M) {
        self.isa.run((
            ReadMoments { moments, exp_avg: self.exp_avg, exp_avg_sq: self.exp_avg_sq },
            [(); Q],
        ));
    }
}

struct WriteMomentsFrom<'a> {
    isa: Isa,
    exp_avg: Source<'a, f32>,
    exp_avg_sq: Source<'a, f32>,
    dither: Dither,
}

impl MomentsVisitor for WriteMomentsFrom<'_> {
    fn visit<const Q: usize, M: Moments<Q>>(self, moments: M) {
        let Self { isa, exp_avg, exp_avg_sq, dither } = self;
        isa.run((WriteMoments { exp_avg, exp_avg_sq, moments, dither }, [(); Q]));
    }
}

/// Calls the visitor with the moments of a chunk.
///
/// # Safety
/// As [`with_master`].
pub(super) unsafe fn with_moments(state: &AdamTensor<Route>, visitor: impl MomentsVisitor) {
    let (kind, routes) = (state.layout().moments, state.moments());
    // SAFETY: passed on from the caller.
    unsafe {
        match (kind, state.layout().param) {
            (MomentsKind::Nearest16, Dtype::Float16) => {
                visit_plain16_moments::<F16>(kind, routes, visitor);
            }
            (MomentsKind::Nearest16, _) => visit_plain16_moments::<Bf16>(kind, routes, visitor),
            _ => visit_moments(kind, routes, visitor),
        }
    }
}
