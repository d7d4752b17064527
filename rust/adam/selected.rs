//! Selected channels: rows or columns of a block of a matrix, which a copy of their state in fp32
//! steps ahead of the tensor's own.
//!
//! A *block* is whole rows of a matrix, one after the other in memory. Its selected channels have a
//! state of their own: master, `exp_avg` and `exp_avg_sq` in fp32 ([`ChannelState`]), packed:
//!
//! | axis | order of the state | element of the block |
//! |---|---|---|
//! | rows | channel after channel | `indices[channel] * row_len + place` |
//! | columns | row after row | `row * row_len + indices[channel]` |
//!
//! - SEL-1 A step of them ([`step`]) has the bits that a step of the tensor would have given them.
//!   It is [`super::kernel`] that steps them, and the weights are rounded as the tensor's master
//!   rounds them. On a GPU `rust/device/channels.ptx` has the same operations in the same order.
//! - SEL-2 The copy begins with the tensor's state ([`read`]): with the bits of its master, and its
//!   moments decoded. With fp32 moments it keeps the bits of the tensor. Coded ones are rounded
//!   where they are stored, and the copy is not: from the first step on it parts from the tensor,
//!   by what that rounds away ([`keeps_bits`]).
//!
//! Cost per selected parameter: a step moves 24 B of state, and gradient and weight. Of q8 moments
//! whole blocks are decoded, up to 63 elements more for each 1024.

use std::ops::Range;

use super::{
    Step,
    batch::{in_place, with_master},
    exchange::{ReadInto, ReadMomentsInto, with_moments},
    kernel::update,
    tensor::AdamTensor,
};
use crate::{
    error::{Error, Result},
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    state::{
        Master,
        codecs::{MasterKind, MomentsKind},
        dither::Dither,
        master::Plain,
        moments::Nearest,
        split::Split,
    },
    stream::{
        BLOCK,
        cursor::{Cursor, Source},
        element::{Bf16, Dtype, Element, F16},
        view::View,
    },
};

/// Elements that are gathered at once.
const PIECE: usize = 1024;

/// How a master becomes the weight beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightKind {
    /// It is the weight.
    Float32,
    /// bf16, ties away from zero: the upper half of a split master.
    Split,
    /// fp16, rounded to nearest, ties to even.
    Float16,
    /// bf16, rounded to nearest, ties to even: the copy beside an fp32 parameter.
    BFloat16,
}

impl WeightKind {
    /// That of a tensor whose channels may be selected.
    ///
    /// # Errors
    /// [`Error::Value`] for a 16-bit parameter without a master.
    pub fn of(tensor: &AdamTensor) -> Result<Self> {
        match (tensor.layout().master, tensor.weight_out) {
            (MasterKind::Float32, None) => Ok(Self::Float32),
            (MasterKind::Float32, Some(weight)) if weight.dtype() == Dtype::Float16 => {
                Ok(Self::Float16)
            }
            (MasterKind::Float32, Some(_)) => Ok(Self::BFloat16),
            (MasterKind::Split { .. }, _) => Ok(Self::Split),
            (MasterKind::Shadowed, _) => Ok(Self::Float16),
            _ => Err(Error::value(format!(
                "channels are selected of a `{}` parameter, expected one that has all bits of its \
                 master",
                tensor.param.dtype()
            ))),
        }
    }

    /// Of the weight, and of its gradient.
    #[must_use]
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Float32 => Dtype::Float32,
            Self::Split | Self::BFloat16 => Dtype::BFloat16,
            Self::Float16 => Dtype::Float16,
        }
    }
}

/// Whether a copy of its channels keeps the bits of the tensor, step by step.
#[must_use]
pub fn keeps_bits(tensor: &AdamTensor) -> bool {
    tensor.layout().moments == MomentsKind::Float32
}

/// How many channels of a block are selected, and along which axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of the block.
    pub rows: usize,
    /// Elements of a row.
    pub row_len: usize,
    /// Selected channels.
    pub count: usize,
    /// Whether channels are columns.
    pub by_columns: bool,
}

impl Shape {
    /// Selected elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.count * if self.by_columns { self.rows } else { self.row_len }
    }

    /// Elements of the block.
    #[must_use]
    pub fn block_len(&self) -> usize {
        self.rows * self.row_len
    }

    /// Neighbours in the state that are a part of one row of the block.
    #[must_use]
    pub fn inner(&self) -> usize {
        if self.by_columns { self.count } else { self.row_len }
    }

    /// Bytes of the state, and of the channels' indices behind it.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        STATE_NBYTES * self.numel() + size_of::<u32>() * self.count
    }

    /// Calls `each` with pieces of the state: where one begins, how many elements it has, and where
    /// these are within the block.
    fn pieces(&self, indices: &[u32], mut each: impl FnMut(usize, usize, Places<'_>)) {
        assert_eq!(indices.len(), self.count, "every channel has its index");
        let (inner, limit) = (self.inner(), if self.by_columns { self.row_len } else { self.rows });
        assert!(indices.iter().all(|&index| (index as usize) < limit), "channels are the block's");
        for outer in 0..self.numel().checked_div(inner).unwrap_or(0) {
            for begin in (0..inner).step_by(PIECE) {
                let len = (inner - begin).min(PIECE);
                let places = if self.by_columns {
                    Places::Picked(outer * self.row_len, &indices[begin..begin + len])
                } else {
                    Places::Run(indices[outer] as usize * self.row_len + begin)
                };
                each(outer * inner + begin, len, places);
            }
        }
    }
}

/// Bytes of state of a selected element.
pub const STATE_NBYTES: usize = 12;

/// Where the elements of a piece are within their block.
enum Places<'a> {
    /// One after the other, from here on.
    Run(usize),
    /// In the row that begins here, in these columns.
    Picked(usize, &'a [u32]),
}

/// The state of selected channels: as many fp32 values in each view as elements are selected.
#[derive(Clone, Copy, Debug)]
pub struct ChannelState {
    /// The masters.
    pub master: View,
    /// The first moments.
    pub exp_avg: View,
    /// The second.
    pub exp_avg_sq: View,
}

impl ChannelState {
    /// That at the beginning of `memory`, bytes of [`Shape::nbytes`]; and the indices behind it.
    #[must_use]
    pub fn within(memory: View, shape: &Shape) -> (Self, View) {
        let (numel, count) = (shape.numel(), shape.count);
        let part = |number: usize| {
            memory.part(4 * numel * number..4 * numel * (number + 1)).cast(Dtype::Float32)
        };
        let indices = memory.part(STATE_NBYTES * numel..STATE_NBYTES * numel + 4 * count);
        let state = Self { master: part(0), exp_avg: part(1), exp_avg_sq: part(2) };
        (state, indices.cast(Dtype::Int32))
    }
}

/// Calls a function of the master that becomes this kind of weight.
macro_rules! of_kind {
    ($kind:expr, $call:ident($($argument:expr),*)) => {
        match $kind {
            WeightKind::Float32 => $call::<Plain<'_, f32>>($($argument),*),
            WeightKind::Split => $call::<Split<'_>>($($argument),*),
            WeightKind::Float16 => $call::<Plain<'_, F16>>($($argument),*),
            WeightKind::BFloat16 => $call::<Plain<'_, Bf16>>($($argument),*),
        }
    };
}

/// The weights that masters are rounded to.
struct Weights<'a, P: Master> {
    from: Source<'a, f32>,
    to: Cursor<'a, P::Weight>,
}

impl<P: Master> Kernel for Weights<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in (0..self.to.len()).step_by(LANES) {
            let count = (self.to.len() - at).min(LANES);
            let master = simd.of_bits(self.from.load(simd, at, count));
            let [weight] = P::weights::<S, 1>(simd, [master]);
            self.to.store(simd, at, count, weight);
        }
    }
}

/// Weights that differ from their rounded masters become the masters.
struct Follow<'a, P: Master> {
    masters: Cursor<'a, f32>,
    weights: Source<'a, P::Weight>,
}

impl<P: Master> Kernel for Follow<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in (0..self.masters.len()).step_by(LANES) {
            let count = (self.masters.len() - at).min(LANES);
            let master = simd.of_bits(self.masters.load(simd, at, count));
            let weight = self.weights.load(simd, at, count);
            let [rounded] = P::weights::<S, 1>(simd, [master]);
            let is_ours = simd.eq_u(rounded, weight);
            let kept = simd.select_f(is_ours, master, P::Weight::widen(simd, weight));
            self.masters.store(simd, at, count, simd.bits(kept));
        }
    }
}

/// Steps selected channels with the gradient of their block, and writes the block's weights of
/// them. `grad` and `weight` are the block's.
///
/// # Safety
/// The memory of all views is alive, and nothing else uses what is written; they are disjoint.
///
/// # Panics
/// For views of other sizes or dtypes, or an index outside of the block.
pub unsafe fn step(
    isa: Isa,
    step: &Step,
    (shape, indices): (&Shape, &[u32]),
    kind: WeightKind,
    grad: View,
    state: &ChannelState,
    weight: View,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        match kind.dtype() {
            Dtype::BFloat16 => update_all::<Bf16>(isa, step, (shape, indices), grad, state),
            Dtype::Float16 => update_all::<F16>(isa, step, (shape, indices), grad, state),
            _ => update_all::<f32>(isa, step, (shape, indices), grad, state),
        }
        write_weights(isa, (shape, indices), kind, state.master, weight);
    }
}

/// # Safety
/// As [`step`]; `G` is the gradient's dtype.
unsafe fn update_all<G: Element>(
    isa: Isa,
    step: &Step,
    (shape, indices): (&Shape, &[u32]),
    grad: View,
    state: &ChannelState,
) {
    assert_eq!((grad.dtype(), grad.numel()), (G::DTYPE, shape.block_len()), "a block's gradient");
    let mut gathered = [G::default(); PIECE];
    shape.pieces(indices, |at, len, places| {
        let range = at..at + len;
        // SAFETY: the caller vouches for the memory; pieces are disjoint, and within the views.
        unsafe {
            let grad = match places {
                Places::Run(begin) => grad.slice::<G>(begin..begin + len),
                Places::Picked(row, columns) => {
                    let row = grad.slice::<G>(row..row + shape.row_len);
                    pick(row, columns, &mut gathered)
                }
            };
            let master = Plain(Cursor::in_place(state.master.slice_mut::<f32>(range.clone())));
            let moments = Nearest::<f32>::new(
                Cursor::in_place(state.exp_avg.slice_mut(range.clone())),
                Cursor::in_place(state.exp_avg_sq.slice_mut(range)),
            );
            // fp32 moments draw on no noise.
            update(isa, step, grad, master, moments, Dither::new(0, step.count, 0));
        }
    });
}

/// Writes the weights of selected channels, rounded from their masters, into those of their block.
///
/// # Safety
/// As [`step`].
///
/// # Panics
/// As [`step`].
pub unsafe fn write_weights(
    isa: Isa,
    channels: (&Shape, &[u32]),
    kind: WeightKind,
    master: View,
    weight: View,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        of_kind!(kind, weights_of(isa, channels, master, weight));
    }
}

/// # Safety
/// As [`step`].
unsafe fn weights_of<P: Master>(
    isa: Isa,
    (shape, indices): (&Shape, &[u32]),
    master: View,
    weight: View,
) {
    let (dtype, numel) = (P::Weight::DTYPE, shape.block_len());
    assert_eq!((weight.dtype(), weight.numel()), (dtype, numel), "a block's weight");
    let mut rounded = [P::Weight::default(); PIECE];
    shape.pieces(indices, |at, len, places| {
        let rounded = &mut rounded[..len];
        // SAFETY: the caller vouches for the memory; pieces are disjoint, and within the views.
        unsafe {
            let from = Source::new(master.slice::<f32>(at..at + len));
            isa.run(Weights::<P> { from, to: Cursor::in_place(&mut *rounded) });
            match places {
                Places::Run(begin) => {
                    weight.slice_mut::<P::Weight>(begin..begin + len).copy_from_slice(rounded);
                }
                Places::Picked(row, columns) => {
                    let row = weight.slice_mut::<P::Weight>(row..row + shape.row_len);
                    for (&column, &value) in columns.iter().zip(&*rounded) {
                        row[column as usize] = value;
                    }
                }
            }
        }
    });
}

/// Makes a weight that differs from its rounded master the master: the program has written it.
///
/// # Safety
/// As [`step`].
///
/// # Panics
/// As [`step`].
pub unsafe fn follow_weights(
    isa: Isa,
    channels: (&Shape, &[u32]),
    kind: WeightKind,
    master: View,
    weight: View,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        of_kind!(kind, follow(isa, channels, master, weight));
    }
}

/// # Safety
/// As [`step`].
unsafe fn follow<P: Master>(
    isa: Isa,
    (shape, indices): (&Shape, &[u32]),
    master: View,
    weight: View,
) {
    let mut gathered = [P::Weight::default(); PIECE];
    shape.pieces(indices, |at, len, places| {
        // SAFETY: the caller vouches for the memory; pieces are disjoint, and within the views.
        unsafe {
            let weights = match places {
                Places::Run(begin) => weight.slice::<P::Weight>(begin..begin + len),
                Places::Picked(row, columns) => {
                    let row = weight.slice::<P::Weight>(row..row + shape.row_len);
                    pick(row, columns, &mut gathered)
                }
            };
            let masters = Cursor::in_place(master.slice_mut::<f32>(at..at + len));
            isa.run(Follow::<P> { masters, weights: Source::new(weights) });
        }
    });
}

/// The elements of a row that are in these columns.
fn pick<'a, T: Copy>(row: &[T], columns: &[u32], to: &'a mut [T; PIECE]) -> &'a [T] {
    for (to, &column) in to.iter_mut().zip(columns) {
        *to = row[column as usize];
    }
    &to[..columns.len()]
}

/// Reads the state of selected channels from that of `tensor`, whose element `first` their block
/// begins with. It has no fingerprints, and the trailing bits are its own.
///
/// # Safety
/// As [`step`].
///
/// # Panics
/// As [`step`], and for a tensor with fingerprints.
pub unsafe fn read(
    isa: Isa,
    (tensor, first): (&AdamTensor, usize),
    (shape, indices): (&Shape, &[u32]),
    to: &ChannelState,
) {
    let mut window = Window::default();
    // SAFETY: passed on from the caller.
    let mut each = |at: usize, len: usize, places: Places<'_>| unsafe {
        let to = [to.master, to.exp_avg, to.exp_avg_sq];
        match places {
            Places::Run(begin) => {
                window.load(isa, tensor, first + begin..first + begin + len);
                for (to, from) in to.iter().zip(window.values()) {
                    to.slice_mut::<f32>(at..at + len).copy_from_slice(from);
                }
            }
            Places::Picked(row, columns) => {
                in_windows(columns, shape.row_len, |left, len, picked| {
                    let begin = first + row + left;
                    window.load(isa, tensor, begin..begin + len);
                    for (to, from) in to.iter().zip(window.values()) {
                        let to = to.slice_mut::<f32>(at + picked.start..at + picked.end);
                        for (to, &column) in to.iter_mut().zip(&columns[picked.clone()]) {
                            *to = from[column as usize - left];
                        }
                    }
                });
            }
        }
    };
    shape.pieces(indices, &mut each);
}

/// Calls `each` with the parts of a row that hold some of these ascending columns: where a part
/// begins, its elements, and which of the columns it holds.
fn in_windows(columns: &[u32], row_len: usize, mut each: impl FnMut(usize, usize, Range<usize>)) {
    let mut begin = 0;
    while begin < columns.len() {
        let first = columns[begin] as usize;
        let len = (row_len - first).min(PIECE);
        let held = columns[begin..].partition_point(|&column| (column as usize) < first + len);
        each(first, len, begin..begin + held);
        begin += held;
    }
}

/// Master and moments of neighbours, decoded.
struct Window {
    /// From the block on that the first of them is in.
    decoded: [[f32; PIECE + BLOCK]; 3],
    /// Where they are among these.
    held: Range<usize>,
}

impl Default for Window {
    fn default() -> Self {
        Self { decoded: [[0.0; PIECE + BLOCK]; 3], held: 0..0 }
    }
}

impl Window {
    /// # Safety
    /// As [`step`].
    unsafe fn load(&mut self, isa: Isa, tensor: &AdamTensor, elements: Range<usize>) {
        let begin = elements.start / BLOCK * BLOCK;
        self.held = elements.start - begin..elements.end - begin;
        let [master, exp_avg, exp_avg_sq] =
            self.decoded.each_mut().map(|values| Cursor::in_place(&mut values[..self.held.end]));
        let route = in_place(&tensor.elements(begin..elements.end));
        // SAFETY: passed on from the caller.
        unsafe {
            with_master(isa, &route, ReadInto { isa, to: master });
            with_moments(&route, ReadMomentsInto { isa, exp_avg, exp_avg_sq });
        }
    }

    /// Of the elements that were loaded last.
    fn values(&self) -> [&[f32]; 3] {
        self.decoded.each_ref().map(|values| &values[self.held.clone()])
    }
}
