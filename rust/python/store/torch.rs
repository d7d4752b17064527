//! What the core reads of a torch tensor, through Python's C interface. Some 50 ns each.

use pyo3::{
    intern,
    prelude::*,
    types::{PyList, PyType},
};

use crate::stream::element::Dtype;

/// Objects of torch's that are compared by identity, and functions of it that are called.
pub(super) struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    strided: Py<PyAny>,
    floats: [(Py<PyAny>, Dtype); 3],
    pub(super) disable_torch_function: Py<PyAny>,
    increment_version: Py<PyAny>,
}

/// What of a tensor says where its elements are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dense {
    pub(super) address: usize,
    pub(super) dtype: Dtype,
    pub(super) nbytes: usize,
    pub(super) is_cpu: bool,
}

impl Torch {
    pub(super) fn import(py: Python<'_>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let core = torch.getattr("_C")?;
        let dtype = |name| -> PyResult<_> { Ok(torch.getattr(name)?.unbind()) };
        Ok(Self {
            tensor: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
            parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?.unbind(),
            strided: dtype("strided")?,
            floats: [
                (dtype("float32")?, Dtype::Float32),
                (dtype("bfloat16")?, Dtype::BFloat16),
                (dtype("float16")?, Dtype::Float16),
            ],
            disable_torch_function: core.getattr("DisableTorchFunction")?.unbind(),
            increment_version: core.getattr("_increment_version")?.unbind(),
        })
    }

    /// Whether this rank has all of the tensor, whose class is torch's own.
    pub(super) fn is_plain(&self, tensor: &Bound<'_, PyAny>) -> bool {
        let kind = tensor.get_type();
        kind.is(&self.tensor) || kind.is(&self.parameter)
    }

    /// Whether the tensor is exactly a parameter.
    pub(super) fn is_parameter(&self, tensor: &Bound<'_, PyAny>) -> bool {
        tensor.get_type().is(&self.parameter)
    }

    /// Where the elements of a plain tensor are; None where they are not one dense run of floats.
    pub(super) fn dense(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Dense>> {
        let py = tensor.py();
        if !tensor.getattr(intern!(py, "layout"))?.is(&self.strided) {
            return Ok(None);
        }
        let Some(dtype) = self.dtype(tensor)? else { return Ok(None) };
        let is_run = tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?
            && !tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?;
        let address = address(tensor)?;
        let nbytes: usize = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
        if !is_run || (address == 0 && nbytes > 0) {
            return Ok(None);
        }
        let is_cpu = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
        Ok(Some(Dense { address, dtype, nbytes, is_cpu }))
    }

    /// The dtype of a tensor; None: it is none that is stepped.
    pub(super) fn dtype(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let dtype = tensor.getattr(intern!(tensor.py(), "dtype"))?;
        let found = self.floats.iter().find(|(object, _)| dtype.is(object));
        Ok(found.map(|(_, dtype)| *dtype))
    }

    /// Has autograd take these for written.
    pub(super) fn increment_version(&self, tensors: &Bound<'_, PyList>) -> PyResult<()> {
        self.increment_version.bind(tensors.py()).call1((tensors,)).map(|_| ())
    }
}

/// Where a dense tensor begins.
pub(super) fn address(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()
}

/// The memory of a tensor: that stays where another is given to it.
pub(super) fn storage(tensor: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    Ok(tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?.unbind())
}
