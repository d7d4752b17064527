//! Which channels of gradients matter, and of which tensors some may be selected.

use pyo3::prelude::*;

use super::tensor::{PyTensorView, dtypes_named};
use crate::{
    error::Result,
    grads::top_k::{self, Axis},
    offload::{Selectable, selection_nbytes},
    stream::element::Dtype,
};

/// A matrix of which channels are chosen: how many rows it has, and columns, and how many of each
/// may be chosen.
type Extent = (usize, usize, usize, usize);

/// What is chosen: whether channels are columns, which ones, their squared norm, and that of all.
type ChosenOf = (bool, Vec<usize>, f64, f64);

/// Of each matrix the rows or columns with the largest norms; the GIL is released.
///
/// Of the axis whose chosen channels capture more; rows where both capture the same, or no column
/// may be chosen. Of equal norms the one with the lowest index comes first, a NaN after all
/// numbers. Takes linear time.
///
/// Args:
///     norms: a float32 view: for each matrix the norms of its rows, then those of its columns.
///     extents: for each matrix its rows and columns, and how many of each may be chosen.
///
/// Returns:
///     for each matrix whether channels are columns, the chosen ones, ascending, their squared norm
///     and that of the whole matrix.
///
/// Raises:
///     ValueError: for another dtype or size, or more channels than there are.
#[pyfunction]
pub(super) fn choose_channels(
    py: Python<'_>,
    norms: &PyTensorView,
    extents: Vec<Extent>,
) -> Result<Vec<ChosenOf>> {
    let view = norms.0;
    let numel = extents.iter().map(|(rows, columns, ..)| rows + columns).sum();
    view.expect("norms", &[Dtype::Float32], numel)?;
    py.detach(|| {
        // SAFETY: the caller that made the view vouches for its memory during this call (see
        // TensorView).
        let mut left = unsafe { view.slice::<f32>(0..numel) };
        let choose = |(rows, columns, row_count, column_count): Extent| {
            let (of_rows, rest) = left.split_at(rows);
            let (of_columns, rest) = rest.split_at(columns);
            left = rest;
            let found = top_k::choose(of_rows, of_columns, row_count, column_count)?;
            Ok((found.axis == Axis::Columns, found.channels, found.captured, found.total))
        };
        extents.into_iter().map(choose).collect()
    })
}

/// Bytes that an engine needs for channels that are stepped on the device.
///
/// Args:
///     numels: elements of each tensor, in forward order.
///     dtypes: of each tensor's gradient and weight.
///     interval: as of `deferral_nbytes`.
///     row_lens: elements of a row of each; 0: it is no matrix.
///     fraction: which share of the rows or columns of every segment is selected, 0 to 1.
///
/// Returns:
///     of device memory, and of host memory.
///
/// Raises:
///     ValueError: for an interval or a fraction out of range.
#[pyfunction]
#[pyo3(
    name = "selection_nbytes",
    signature = (numels, dtypes, interval, row_lens, *, fraction)
)]
pub(super) fn py_selection_nbytes(
    numels: Vec<usize>,
    dtypes: Vec<String>,
    interval: usize,
    row_lens: Vec<usize>,
    fraction: f64,
) -> Result<(usize, usize)> {
    selection_nbytes(&numels, &dtypes_named(dtypes)?, interval, &row_lens, fraction)
}

/// A segment of which channels may be selected.
#[pyclass(name = "Selectable", module = "stepwell._core", frozen, skip_from_py_object)]
pub(super) struct PySelectable(pub(super) Selectable);

#[pymethods]
impl PySelectable {
    /// Which tensor of the engine.
    #[getter]
    fn tensor(&self) -> usize {
        self.0.tensor
    }

    /// Which segment of the engine.
    #[getter]
    fn segment(&self) -> usize {
        self.0.segment
    }

    /// Which group it has its turns with.
    #[getter]
    fn group(&self) -> usize {
        self.0.group
    }

    /// The element of the tensor that its rows begin with.
    #[getter]
    fn first(&self) -> usize {
        self.0.first
    }

    /// How many rows.
    #[getter]
    fn rows(&self) -> usize {
        self.0.rows
    }

    /// Elements of a row.
    #[getter]
    fn row_len(&self) -> usize {
        self.0.row_len
    }

    /// How many rows may be selected.
    #[getter]
    fn row_count(&self) -> usize {
        self.0.row_count
    }

    /// How many columns may.
    #[getter]
    fn column_count(&self) -> usize {
        self.0.column_count
    }
}
