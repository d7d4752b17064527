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
        top_k::{self as selection, Axis, Channels, Chosen},
    },
    offload::{Granted, Scope, Selectable, grant, selection_nbytes},
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

/// For each tensor the indices, ascending, of the channels that capture most per byte within a
/// budget for all; the GIL is released.
///
/// Channels are taken by their score per byte, of equal ones first those of the first tensor and
/// the lowest index, until one does not fit: less than one channel of the budget is left. A NaN
/// comes after all numbers. Takes linear time.
///
/// Args:
///     scores: for each tensor a float64 view of a score for each channel.
///     channel_bytes: for each tensor what choosing one of its channels costs, at least 1.
///     budget_bytes: for all that are chosen.
///
/// Raises:
///     ValueError: for another dtype, channels of no bytes, or lists of different lengths.
#[pyfunction]
#[pyo3(signature = (scores, *, channel_bytes, budget_bytes))]
pub(super) fn top_k_within(
    py: Python<'_>,
    scores: Vec<PyRef<'_, PyTensorView>>,
    channel_bytes: Vec<u64>,
    budget_bytes: u64,
) -> Result<Vec<Vec<usize>>> {
    check_lengths("channel_bytes", channel_bytes.len(), scores.len())?;
    let views: Vec<View> = scores.iter().map(|view| view.0).collect();
    py.detach(|| {
        let tensor = |(&view, &channel_bytes): (&View, &u64)| {
            // SAFETY: as in `channel_sq_norms`.
            let scores = unsafe { self::scores("scores", view) }?;
            Ok(Channels { scores, channel_bytes })
        };
        let tensors = views.iter().zip(&channel_bytes).map(tensor).collect::<Result<Vec<_>>>()?;
        selection::top_k_within(&tensors, budget_bytes)
    })
}

/// Squared norm that the largest `share` of the scores capture; the GIL is released. A NaN counts
/// as 0.
///
/// Where the share is no whole number of channels, the next one counts with the part that is left:
/// so rows and columns of any number can be compared.
///
/// Args:
///     scores: a float64 view.
///     share: of the number of channels, 0 to 1.
///
/// Raises:
///     ValueError: for another dtype, or a share that is not from 0 to 1.
#[pyfunction]
#[pyo3(signature = (scores, *, share))]
pub(super) fn captured(py: Python<'_>, scores: &PyTensorView, share: f64) -> Result<f64> {
    let view = scores.0;
    // SAFETY: as in `channel_sq_norms`.
    py.detach(|| selection::captured(unsafe { self::scores("scores", view) }?, share))
}

/// "rows" or "columns": which capture more of a matrix at the same share, rows where both capture
/// the same; the GIL is released.
///
/// Args:
///     row_sq_norms: a float64 view, as `channel_sq_norms` writes it.
///     column_sq_norms: the same of the columns.
///     share: of the rows or of the columns, 0 to 1.
///
/// Raises:
///     ValueError: as `captured`.
#[pyfunction]
#[pyo3(signature = (row_sq_norms, column_sq_norms, *, share))]
pub(super) fn better_axis(
    py: Python<'_>,
    row_sq_norms: &PyTensorView,
    column_sq_norms: &PyTensorView,
    share: f64,
) -> Result<&'static str> {
    let (rows, columns) = (row_sq_norms.0, column_sq_norms.0);
    // SAFETY: as in `channel_sq_norms`.
    let axis = py.detach(|| unsafe {
        let rows = scores("row_sq_norms", rows)?;
        selection::better_axis(rows, scores("column_sq_norms", columns)?, share)
    })?;
    Ok(match axis {
        Axis::Rows => "rows",
        Axis::Columns => "columns",
    })
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

/// What is granted to a matrix: as [`ChosenOf`], and how many rows or columns its memory holds.
type GrantedOf = (bool, Vec<usize>, f64, f64, usize, usize);

/// The rows or columns of all matrices that capture most per byte of state, within a budget for
/// all; the GIL is released.
///
/// Of each matrix channels of the axis that captures more at the share that the budget is of the
/// state of all. They are taken by their squared norm per byte until one does not fit. Of equal
/// ones those of the first matrix and of the lowest index come first, a NaN after all numbers.
/// Takes linear time.
///
/// Args:
///     norms: a float32 view: for each matrix the norms of its rows, then those of its columns.
///     matrices: what an engine says of them.
///     budget_bytes: of device memory for the state of all.
///
/// Returns:
///     for each matrix whether channels are columns, the chosen ones, ascending, their squared norm
///     and that of the whole matrix, and how many rows, and columns, may be chosen in their place.
///
/// Raises:
///     ValueError: for another dtype or size.
#[pyfunction]
#[pyo3(signature = (norms, matrices, *, budget_bytes))]
pub(super) fn grant_channels(
    py: Python<'_>,
    norms: &PyTensorView,
    matrices: Vec<PyRef<'_, PySelectable>>,
    budget_bytes: usize,
) -> Result<Vec<GrantedOf>> {
    let view = norms.0;
    let matrices: Vec<Selectable> = matrices.iter().map(|one| one.0).collect();
    let numel = matrices.iter().map(|one| one.rows + one.row_len).sum();
    view.expect("norms", &[Dtype::Float32], numel)?;
    py.detach(|| {
        // SAFETY: as in `channel_sq_norms`.
        let mut left = unsafe { view.slice::<f32>(0..numel) };
        let norms = matrices.iter().map(|one| {
            let (of_rows, rest) = left.split_at(one.rows);
            let (of_columns, rest) = rest.split_at(one.row_len);
            left = rest;
            (of_rows, of_columns)
        });
        let granted = grant(&matrices, &norms.collect::<Vec<_>>(), budget_bytes)?;
        let of = |one: Granted| {
            let Chosen { axis, channels, captured, total } = one.chosen;
            let by_columns = axis == Axis::Columns;
            (by_columns, channels, captured, total, one.row_count, one.column_count)
        };
        Ok(granted.into_iter().map(of).collect())
    })
}

/// How many channels are selected.
///
/// # Errors
/// [`Error::Value`] for both a fraction and a budget.
pub(super) fn scope_of(fraction: f64, budget_bytes: Option<usize>) -> Result<Scope> {
    match budget_bytes {
        Some(_) if fraction != 0.0 => Err(Error::value(format!(
            "fraction is `{fraction}` and budget_bytes is given, expected one of them"
        ))),
        Some(budget_bytes) => Ok(Scope::Global(budget_bytes)),
        None => Ok(Scope::Tensor(fraction)),
    }
}

/// Bytes that an engine needs for channels that are stepped on the device.
///
/// Args:
///     numels: elements of each tensor, in forward order.
///     dtypes: of each tensor's gradient and weight.
///     interval: as of `deferral_nbytes`.
///     row_lens: elements of a row of each; 0: it is no matrix.
///     fraction: which share of the rows or columns of every segment is selected, 0 to 1.
///     budget_bytes: or how many bytes of device memory all segments share.
///
/// Returns:
///     of device memory, at most the budget, and of host memory.
///
/// Raises:
///     ValueError: for an interval or a fraction out of range, or a budget that is less than what
///         is selected whole.
#[pyfunction]
#[pyo3(
    name = "selection_nbytes",
    signature = (numels, dtypes, interval, row_lens, *, fraction=0.0, budget_bytes=None)
)]
pub(super) fn py_selection_nbytes(
    numels: Vec<usize>,
    dtypes: Vec<String>,
    interval: usize,
    row_lens: Vec<usize>,
    fraction: f64,
    budget_bytes: Option<usize>,
) -> Result<(usize, usize)> {
    let scope = scope_of(fraction, budget_bytes)?;
    selection_nbytes(&numels, &dtypes_named(dtypes)?, interval, &row_lens, scope)
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

    /// Bytes of the device memory that is always its own; 0: it shares a budget.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.nbytes
    }
}
