//! Of which channels an engine may select some, and how much memory their state has: fixed when it
//! is made.
//!
//! The *block* of a segment is the whole rows of its matrix that lie in it. Rows or columns of it
//! may be selected. What is selected of a segment has a *place* in the device's memory:
//!
//! | scope | places |
//! |---|---|
//! | tensor | of every segment, for a share of its rows or of its columns, whichever takes more |
//! | global | of segments that are selected whole; a job that is whole lays out the rest anew |
//!
//! Host memory, through which state is sent, holds an eighth of what a group of segments takes, and
//! one segment's at least. More than it holds is sent in several rounds.

use std::ops::Range;

use super::{groups::Groups, segment::Segments};
use crate::{
    adam::selected::Shape,
    error::{Error, Result},
    state::chunk::CHUNK_LEN,
    stream::{element::Dtype, view::View},
};

/// Of every segment's place: what the device's copies like.
pub(super) const ALIGN_BYTES: usize = 64;

/// In how many rounds the state of a group of segments is sent. Each waits for the copies of the
/// one before; fewer take more host memory (all at once of a tenth, with four groups: .3 B per
/// parameter).
const ROUNDS: usize = 8;

/// A share this close below a whole number of channels is one: products of decimal fractions are
/// off by as much.
const SHARE_SLACK: f64 = 1e-9;

/// How many channels are selected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scope {
    /// Of every segment this share of its rows, or of its columns: 0 to 1. 1 is all elements,
    /// whatever the shape.
    Tensor(f64),
    /// Of all segments together as many as have room in so many bytes of device memory. Jobs that
    /// are whole say how many of which.
    Global(usize),
}

/// What an engine needs for channels that are stepped on the device.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// For each tensor the elements of a row; 0: it is no matrix.
    pub row_lens: &'a [usize],
    /// How many channels are selected.
    pub scope: Scope,
    /// Address of device memory of [`selection_nbytes`], a multiple of 64; it outlives the engine.
    pub device: u64,
    /// Host memory of [`selection_nbytes`]; it outlives the engine.
    pub staging: View,
}

/// Bytes of device memory, and of host memory, that an engine needs for selected channels.
///
/// # Errors
/// [`Error::Value`] for an interval or a fraction out of range, lists of other lengths, or a budget
/// that is less than what is selected whole.
pub fn selection_nbytes(
    numels: &[usize],
    dtypes: &[Dtype],
    interval: usize,
    row_lens: &[usize],
    scope: Scope,
) -> Result<(usize, usize)> {
    let segments = Segments::new(numels);
    let groups = Groups::new(&segments, dtypes, interval)?;
    let plans = Plans::new(&segments, &groups, row_lens, scope)?;
    Ok((plans.device_nbytes, plans.staging_nbytes))
}

/// A segment of which channels may be selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selectable {
    /// Which tensor of the engine.
    pub tensor: usize,
    /// Which segment of the engine.
    pub segment: usize,
    /// Which group it has its turns with.
    pub group: usize,
    /// The element of the tensor that its block begins with.
    pub first: usize,
    /// Rows of the block.
    pub rows: usize,
    /// Elements of a row.
    pub row_len: usize,
    /// How many rows may be selected.
    pub row_count: usize,
    /// How many columns may.
    pub column_count: usize,
    /// Bytes of the place that is always its own; 0: jobs that are whole give it one.
    pub nbytes: usize,
}

impl Selectable {
    /// As many rows or columns as may be selected.
    fn shape(&self, by_columns: bool) -> Shape {
        self.shape_of(by_columns, if by_columns { self.column_count } else { self.row_count })
    }

    /// So many rows or columns.
    pub(super) fn shape_of(&self, by_columns: bool, count: usize) -> Shape {
        Shape { rows: self.rows, row_len: self.row_len, count, by_columns }
    }

    /// The larger of what rows and columns take.
    fn nbytes_max(&self) -> usize {
        let most = self.shape(false).nbytes().max(self.shape(true).nbytes());
        most.next_multiple_of(ALIGN_BYTES)
    }
}

/// The block of a segment, and how many of its channels are selected; None: none can be.
fn selectable(
    segments: &Segments,
    groups: &Groups,
    (tensor, segment): (usize, usize),
    row_len: usize,
    scope: Scope,
) -> Option<Selectable> {
    let fraction = match scope {
        Scope::Tensor(fraction) => fraction,
        // As many as there are.
        Scope::Global(_) => 1.0,
    };
    let elements = segments.elements(tensor, segment);
    let group = groups.of(segment);
    if fraction == 0.0 || elements.is_empty() {
        return None;
    }
    let is_small = row_len == 0 && segments.numel(tensor) <= CHUNK_LEN;
    if scope == Scope::Tensor(1.0) || is_small {
        // One row that is all of the segment: norms and biases as well.
        let (first, row_len) = (elements.start, elements.len());
        let found = Selectable {
            tensor,
            segment,
            group,
            first,
            rows: 1,
            row_len,
            row_count: 1,
            column_count: 0,
            nbytes: 0,
        };
        return Some(Selectable { nbytes: found.nbytes_max(), ..found });
    }
    // A row that crosses the segment's border is in neither.
    let first_row = elements.start.div_ceil(row_len.max(1));
    let rows = elements.end.checked_div(row_len)?.checked_sub(first_row)?;
    let count_of = |channels: usize| (fraction * channels as f64 + SHARE_SLACK) as usize;
    let found = Selectable {
        tensor,
        segment,
        group,
        first: first_row * row_len,
        rows,
        row_len,
        row_count: count_of(rows),
        column_count: if rows == 0 { 0 } else { count_of(row_len) },
        nbytes: 0,
    };
    let nbytes = if matches!(scope, Scope::Global(_)) { 0 } else { found.nbytes_max() };
    (found.row_count + found.column_count > 0).then_some(Selectable { nbytes, ..found })
}

/// Where the state of a segment's selection may be, within the device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) offset: usize,
    pub(super) nbytes: usize,
}

/// What may be selected of all segments, and the memory for it.
pub(super) struct Plans {
    pub(super) of_segments: Box<[Option<Selectable>]>,
    /// The places that stay, of each segment.
    pub(super) fixed: Box<[Option<Place>]>,
    /// Behind them: what jobs that are whole lay out. Empty for [`Scope::Tensor`].
    pub(super) shared: Range<usize>,
    pub(super) device_nbytes: usize,
    pub(super) staging_nbytes: usize,
}

impl Plans {
    /// # Errors
    /// As [`selection_nbytes`].
    pub(super) fn new(
        segments: &Segments,
        groups: &Groups,
        row_lens: &[usize],
        scope: Scope,
    ) -> Result<Self> {
        if let Scope::Tensor(fraction) = scope
            && !(0.0..=1.0).contains(&fraction)
        {
            return Err(Error::value(format!("fraction is `{fraction}`, expected 0 to 1")));
        }
        if row_lens.len() != segments.tensors() {
            return Err(Error::value(format!(
                "row_lens has `{}` entries, expected one for each of {} tensors",
                row_lens.len(),
                segments.tensors()
            )));
        }
        let found = row_lens.iter().enumerate().flat_map(|(tensor, &row_len)| {
            let of_tensor = segments.of(tensor);
            of_tensor.map(move |at| selectable(segments, groups, (tensor, at), row_len, scope))
        });
        let of_segments: Box<[Option<Selectable>]> = found.collect();
        let mut fixed_nbytes = 0;
        let fixed = of_segments.iter().map(|one| {
            let nbytes = one.map_or(0, |one| one.nbytes);
            let offset = fixed_nbytes;
            fixed_nbytes += nbytes;
            (nbytes > 0).then_some(Place { offset, nbytes })
        });
        let fixed = fixed.collect();
        let selectables = || of_segments.iter().flatten();
        let largest = selectables().map(Selectable::nbytes_max).max().unwrap_or(0);
        let staging_of = |group_nbytes: usize| {
            largest.max(group_nbytes.div_ceil(ROUNDS).next_multiple_of(ALIGN_BYTES))
        };
        let (device_nbytes, staging_nbytes) = match scope {
            Scope::Tensor(_) => {
                let mut of_groups = vec![0; groups.count()];
                selectables().for_each(|one| of_groups[one.group] += one.nbytes);
                (fixed_nbytes, staging_of(of_groups.into_iter().max().unwrap_or(0)))
            }
            Scope::Global(budget_bytes) => {
                if budget_bytes < fixed_nbytes {
                    return Err(Error::value(format!(
                        "budget_bytes is `{budget_bytes}`, expected at least {fixed_nbytes}: small \
                         parameters of one dimension are selected whole"
                    )));
                }
                let all: usize = selectables().map(Selectable::nbytes_max).sum();
                let nbytes = all.min(budget_bytes / ALIGN_BYTES * ALIGN_BYTES);
                (nbytes, nbytes.min(staging_of(nbytes.div_ceil(groups.count()))))
            }
        };
        let shared = fixed_nbytes..device_nbytes;
        Ok(Self { of_segments, fixed, shared, device_nbytes, staging_nbytes })
    }

    /// The places of segments of which a job that is whole selects as much as `shapes` says, in
    /// this order; None: there is not enough memory.
    pub(super) fn laid_out(
        &self,
        shapes: impl Iterator<Item = (usize, Shape)>,
    ) -> Option<Box<[Option<Place>]>> {
        let mut places = self.fixed.clone();
        let mut left = self.shared.clone();
        for (segment, shape) in shapes {
            if places[segment].is_none() {
                let nbytes = shape.nbytes().next_multiple_of(ALIGN_BYTES);
                places[segment] = Some(Place { offset: left.start, nbytes });
                left.start += nbytes;
            }
        }
        (left.start <= left.end).then_some(places)
    }
}
