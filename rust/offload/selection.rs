//! Of which channels an engine may select some, and how much memory their state has: fixed when it
//! is made.
//!
//! The *block* of a segment is the whole rows of its matrix that lie in it. Rows or columns of it
//! may be selected. What is selected of a segment has a *place* in the device's memory: for a share
//! of its rows or of its columns, whichever takes more.
//!
//! Host memory, through which state is sent, holds an eighth of what a group of segments takes, and
//! one segment's at least. More than it holds is sent in several rounds.

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

/// What an engine needs for channels that are stepped on the device.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// For each tensor the elements of a row; 0: it is no matrix.
    pub row_lens: &'a [usize],
    /// Of every segment this share of its rows, or of its columns, is selected: 0 to 1. 1 is all
    /// elements, whatever the shape.
    pub fraction: f64,
    /// Address of device memory of [`selection_nbytes`], a multiple of 64; it outlives the engine.
    pub device: u64,
    /// Host memory of [`selection_nbytes`]; it outlives the engine.
    pub staging: View,
}

/// Bytes of device memory, and of host memory, that an engine needs for selected channels.
///
/// # Errors
/// [`Error::Value`] for an interval or a fraction out of range, or lists of other lengths.
pub fn selection_nbytes(
    numels: &[usize],
    dtypes: &[Dtype],
    interval: usize,
    row_lens: &[usize],
    fraction: f64,
) -> Result<(usize, usize)> {
    let segments = Segments::new(numels);
    let groups = Groups::new(&segments, dtypes, interval)?;
    let plans = Plans::new(&segments, &groups, row_lens, fraction)?;
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
    /// Where its place begins, within the device memory.
    pub(super) offset: usize,
}

impl Selectable {
    /// So many rows or columns.
    pub(super) fn shape_of(&self, by_columns: bool, count: usize) -> Shape {
        Shape { rows: self.rows, row_len: self.row_len, count, by_columns }
    }

    /// Bytes of its place: the larger of what rows and columns take.
    pub fn nbytes(&self) -> usize {
        let rows = self.shape_of(false, self.row_count);
        let columns = self.shape_of(true, self.column_count);
        rows.nbytes().max(columns.nbytes()).next_multiple_of(ALIGN_BYTES)
    }
}

/// The block of a segment, and how many of its channels are selected; None: none can be. Its place
/// is to be found.
fn selectable(
    segments: &Segments,
    groups: &Groups,
    (tensor, segment): (usize, usize),
    row_len: usize,
    fraction: f64,
) -> Option<Selectable> {
    let elements = segments.elements(tensor, segment);
    let group = groups.of(segment);
    if fraction == 0.0 || elements.is_empty() {
        return None;
    }
    let is_small = row_len == 0 && segments.numel(tensor) <= CHUNK_LEN;
    if fraction == 1.0 || is_small {
        // One row that is all of the segment: norms and biases as well.
        let (first, row_len) = (elements.start, elements.len());
        return Some(Selectable {
            tensor,
            segment,
            group,
            first,
            rows: 1,
            row_len,
            row_count: 1,
            column_count: 0,
            offset: 0,
        });
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
        offset: 0,
    };
    (found.row_count + found.column_count > 0).then_some(found)
}

/// What may be selected of all segments, and the memory for it.
pub(super) struct Plans {
    pub(super) of_segments: Box<[Option<Selectable>]>,
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
        fraction: f64,
    ) -> Result<Self> {
        if !(0.0..=1.0).contains(&fraction) {
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
            of_tensor.map(move |at| selectable(segments, groups, (tensor, at), row_len, fraction))
        });
        let mut of_segments: Box<[Option<Selectable>]> = found.collect();
        let mut device_nbytes = 0;
        let mut of_groups = vec![0; groups.count()];
        let mut largest = 0;
        for one in of_segments.iter_mut().flatten() {
            one.offset = device_nbytes;
            device_nbytes += one.nbytes();
            of_groups[one.group] += one.nbytes();
            largest = largest.max(one.nbytes());
        }
        let of_group = of_groups.into_iter().max().unwrap_or(0);
        let staging_nbytes = largest.max(of_group.div_ceil(ROUNDS).next_multiple_of(ALIGN_BYTES));
        Ok(Self { of_segments, device_nbytes, staging_nbytes })
    }
}
