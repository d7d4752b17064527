//! How tensors cross the boundary.

use pyo3::prelude::*;

use crate::{
    error::{Error, Result},
    stream::{element::Dtype, view::View},
};

/// A dense run of `numel` elements of `dtype` at `address`.
///
/// The caller that makes a view keeps the memory alive, and unused by other code, during the calls
/// that it is handed to.
///
/// Args:
///     address: of the first element, in bytes; a multiple of the element's size (of 4 for uint8).
///     dtype: "float32", "bfloat16", "float16", "int16", "int32", "uint8" or "float64".
///     numel: number of elements.
///
/// Raises:
///     ValueError: for an unknown dtype, or an address that cannot hold the elements.
#[pyclass(name = "TensorView", module = "stepwell._core", frozen)]
pub(super) struct PyTensorView(pub(super) View);

#[pymethods]
impl PyTensorView {
    #[new]
    #[pyo3(signature = (*, address, dtype, numel))]
    fn new(address: usize, dtype: &str, numel: usize) -> Result<Self> {
        View::new(address, dtype_named(dtype)?, numel).map(Self)
    }

    /// Address of the first element, in bytes.
    #[getter]
    fn address(&self) -> usize {
        self.0.address()
    }

    /// torch's name of the dtype, without the `torch.` prefix.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    /// Number of elements.
    #[getter]
    fn numel(&self) -> usize {
        self.0.numel()
    }

    fn __repr__(&self) -> String {
        format!(
            "TensorView(address={:#x}, dtype={:?}, numel={})",
            self.address(),
            self.dtype(),
            self.numel()
        )
    }
}

/// The dtype that torch calls `name`.
pub(super) fn dtype_named(name: &str) -> Result<Dtype> {
    Dtype::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = Dtype::ALL.iter().map(|dtype| dtype.name()).collect();
        Error::value(format!("dtype is `{name}`, expected one of {}", names.join(", ")))
    })
}

/// Those dtypes.
pub(super) fn dtypes_named(names: Vec<String>) -> Result<Vec<Dtype>> {
    names.iter().map(|name| dtype_named(name)).collect()
}
