//! Of which channels an engine may select some, and where their state is: fixed when it is made.
//!
//! The *block* of a segment is the whole rows of its matrix that lie in it. A share of its rows or
//! of its columns may be selected, always as many. So the memory for their state is taken once: for
//! each segment the larger of what rows and columns take, one after the other on the device, and in
//! host memory for one group of segments at a time.

use super::{groups::Groups, segment::Segments};
use crate::{
    adam::selected::Shape,
    error::{Error, Result},
    state::chunk::CHUNK_LEN,
    stream::{element::Dtype, view::View},
};

/// Of every segment's place: what the device's copies like.
pub(super) const ALIGN_BYTES: usize = 64;

/// A share this close below a whole number of channels is one: products of decimal fractions are
/// off by as much.
const SHARE_SLACK: f64 = 1e-9;

/// What an engine needs for channels that are stepped on the device.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// For each tensor the elements of a row; 0: it is no matrix.
    pub row_lens: &'a [usize],
    /// Which share of the rows or columns of a segment is selected: 0 to 1. 1 is all elements,
    /// whatever the shape.
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
}

impl Selectable {
    pub(super) fn shape(&self, by_columns: bool) -> Shape {
        let count = if by_columns { self.column_count } else { self.row_count };
        Shape { rows: self.rows, row_len: self.row_len, count, by_columns }
    }

    /// The larger of what rows and columns take.
    fn nbytes(&self) -> usize {
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
    fraction: f64,
) -> Option<Selectable> {
    let elements = segments.elements(tensor, segment);
    let group = groups.of(segment);
    let is_small = row_len == 0 && segments.numel(tensor) <= CHUNK_LEN;
    if fraction == 0.0 || elements.is_empty() {
        return None;
    }
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
    };
    (found.row_count + found.column_count > 0).then_some(found)
}

/// Where the state of a segment's selection is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) selectable: Selectable,
    /// Within the device memory.
    pub(super) offset: usize,
    /// Within the staging of its group.
    pub(super) staging_offset: usize,
}

/// The plans of all segments.
pub(super) struct Plans {
    pub(super) of_segments: Box<[Option<Plan>]>,
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
        let mut device_nbytes = 0;
        let mut staged = vec![0; groups.count()];
        let mut of_segments = Vec::with_capacity(segments.count());
        for (tensor, &row_len) in row_lens.iter().enumerate() {
            for segment in segments.of(tensor) {
                let found = selectable(segments, groups, (tensor, segment), row_len, fraction);
                of_segments.push(found.map(|selectable| {
                    let staging_offset = &mut staged[selectable.group];
                    let plan =
                        Plan { selectable, offset: device_nbytes, staging_offset: *staging_offset };
                    device_nbytes += selectable.nbytes();
                    *staging_offset += selectable.nbytes();
                    plan
                }));
            }
        }
        let staging_nbytes = staged.into_iter().max().unwrap_or(0);
        Ok(Self { of_segments: of_segments.into(), device_nbytes, staging_nbytes })
    }
}
