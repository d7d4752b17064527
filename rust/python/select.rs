//! Which channels of gradients matter, and of which tensors some may be selected.

use pyo3::prelude::*;

use super::{
    host::PyPool,
    tensor::{PyTensorView, dtypes_named},
};
use crate::{
    error::{Error, Result},
    grads::{
        channels::{self, Matrix},
        top_k::{self as selection, Axis},
    },
    offload::{Selectable, selection_nbytes},
    simd::isa::Isa,
    stream::{
        element::Dtype,
        view::{View, check_disjoint},
    },
};

/// The scores of a view.
///
/// # Safety
/// As [`View::sums`].
unsafe fn scores<'a>(name: &str, view: View) -> Result<&'a [f64]> {
    view.expect(name, &[Dtype::Float64], view.numel())?;
    // SAFETY: passed on from the caller.
    Ok(unsafe { view.sums() })
}

fn check_lengths(name: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::value(format!(
        "{name} has `{len}` entries, expected {expected}: one for each tensor"
    )))
}

/// Squared norm of each row and of each column of gradients, in one read; the GIL is released.
///
/// A gradient is taken as a matrix: rows of `columns` elements each. Sums are in double precision,
/// over fixed tiles: they depend on neither threads, alignment nor ISA. A NaN makes those of its
/// row and its column NaNs. Cost: reads the gradients once; during the call 0.04 B for each element
/// of large matrices.
///
/// Args:
///     grads: float32, bfloat16 or float16, each contiguous.
///     columns: for each gradient the elements of a row, a divisor of its elements.
///     row_sq_norms: for each gradient float64 views of as many sums as it has rows, written.
///     column_sq_norms: the same of its columns.
///     pool: the default pool if None.
///
/// Raises:
///     ValueError: with nothing written, for views of another dtype or size, or that overlap.
#[pyfunction]
#[pyo3(signature = (grads, *, columns, row_sq_norms, column_sq_norms, pool=None))]
pub(super) fn channel_sq_norms(
    py: Python<'_>,
    grads: Vec<PyRef<'_, PyTensorView>>,
    columns: Vec<usize>,
    row_sq_norms: Vec<PyRef<'_, PyTensorView>>,
    column_sq_norms: Vec<PyRef<'_, PyTensorView>>,
    pool: Option<&PyPool>,
) -> Result<()> {
    check_lengths("columns", columns.len(), grads.len())?;
    check_lengths("row_sq_norms", row_sq_norms.len(), grads.len())?;
    check_lengths("column_sq_norms", column_sq_norms.len(), grads.len())?;
    let views = |views: &[PyRef<'_, PyTensorView>]| -> Vec<View> {
        views.iter().map(|view| view.0).collect()
    };
    let (grads, of_rows, of_columns) =
        (views(&grads), views(&row_sq_norms), views(&column_sq_norms));
    let matrices = grads
        .iter()
        .zip(&columns)
        .map(|(&grad, &columns)| Matrix::new(grad, columns))
        .collect::<Result<Vec<Matrix>>>()?;
    for (matrix, (of_rows, of_columns)) in matrices.iter().zip(of_rows.iter().zip(&of_columns)) {
        of_rows.expect("row_sq_norms", &[Dtype::Float64], matrix.rows())?;
        of_columns.expect("column_sq_norms", &[Dtype::Float64], matrix.columns())?;
    }
    let named = |name, views: &[View]| -> Vec<(&str, View)> {
        views.iter().map(|&view| (name, view)).collect()
    };
    check_disjoint(
        named("row_sq_norms", &of_rows).into_iter().chain(named("column_sq_norms", &of_columns)),
        named("grad", &grads).into_iter(),
    )?;
    let pool = PyPool::pool(pool);
    py.detach(|| {
        // SAFETY: the caller that made the views vouches for their memory during this call (see
        // TensorView); those that are written are disjoint from all others, as checked.
        unsafe {
            let found = channels::channel_sq_norms(pool.get()?, Isa::detect()?, &matrices);
            for (found, (of_rows, of_columns)) in found.iter().zip(of_rows.iter().zip(&of_columns))
            {
                of_rows.sums_mut().copy_from_slice(&found.rows);
                of_columns.sums_mut().copy_from_slice(&found.columns);
            }
        }
        Ok(())
    })
}

/// Indices of the `k` largest scores, ascending; the GIL is released.
///
/// Of equal scores the one with the lowest index comes first. A NaN comes after all numbers. Takes
/// linear time.
///
/// Args:
///     scores: a float64 view.
///     k: how many, at most all.
///
/// Raises:
///     ValueError: for another dtype, or more than there are.
#[pyfunction]
pub(super) fn top_k(py: Python<'_>, scores: &PyTensorView, k: usize) -> Result<Vec<usize>> {
    let view = scores.0;
    // SAFETY: as in `channel_sq_norms`.
    py.detach(|| selection::top_k(unsafe { self::scores("scores", view) }?, k))
}

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
        // SAFETY: as in `channel_sq_norms`.
        let mut left = unsafe { view.slice::<f32>(0..numel) };
        let choose = |(rows, columns, row_count, column_count): Extent| {
            let (of_rows, rest) = left.split_at(rows);
            let (of_columns, rest) = rest.split_at(columns);
            left = rest;
            let found = selection::choose(of_rows, of_columns, row_count, column_count)?;
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
