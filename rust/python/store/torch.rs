//! What the core reads of a torch tensor: through torch's table of C functions for DLPack, in some
//! 20 ns, and where that says nothing, through Python's C interface, in 50.

use std::{
    ffi::{CStr, c_int, c_void},
    ptr,
};

use pyo3::{
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyCapsule, PyList, PyType},
};

use crate::{error::Error, stream::element::Dtype};

/// Objects of torch's that are compared by identity, and functions of it that are called.
pub(super) struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    pub(super) disable_torch_function: Py<PyAny>,
    increment_version: Py<PyAny>,
}

/// Where the elements of a tensor are.
#[derive(Clone, Copy, Debug)]
struct Layout {
    address: usize,
    /// None: it is none that is stepped.
    dtype: Option<Dtype>,
    numel: usize,
    /// Whether they lie one after the other, in row-major order.
    is_contiguous: bool,
    is_cpu: bool,
}

/// A dense run of floats.
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
        Ok(Self {
            tensor: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
            parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?.unbind(),
            disable_torch_function: core.getattr("DisableTorchFunction")?.unbind(),
            increment_version: core.getattr("_increment_version")?.unbind(),
        })
    }

    /// Whether this rank has all of the tensor, whose class is torch's own.
    pub(super) fn is_plain(&self, tensor: &Bound<'_, PyAny>) -> bool {
        let kind = tensor.get_type();
        kind.is(&self.tensor) || kind.is(&self.parameter)
    }

    /// Has autograd take these for written.
    pub(super) fn increment_version(&self, tensors: &Bound<'_, PyList>) -> PyResult<()> {
        self.increment_version.bind(tensors.py()).call1((tensors,)).map(|_| ())
    }
}

/// Where the elements of a plain tensor are; None where they are not one dense run of floats.
pub(super) fn dense(tensor: &Bound<'_, PyAny>) -> PyResult<Option<Dense>> {
    // Of a sparse tensor there is none.
    let Ok(layout) = layout(tensor) else { return Ok(None) };
    let Layout { address, dtype: Some(dtype), numel, is_contiguous: true, is_cpu } = layout else {
        return Ok(None);
    };
    let nbytes = numel * dtype.size();
    // A lazy zero has no memory, and a lazily negated tensor that of its opposite.
    let is_lazy = (address == 0 && nbytes > 0)
        || tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy()?;
    Ok((!is_lazy).then_some(Dense { address, dtype, nbytes, is_cpu }))
}

/// Where a tensor begins.
pub(super) fn address(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(layout(tensor)?.address)
}

/// Whether a tensor begins at an address. One without memory of its own begins nowhere.
pub(super) fn is_at(tensor: &Bound<'_, PyAny>, address: usize) -> bool {
    layout(tensor).is_ok_and(|found| found.address == address)
}

/// Where the elements of a tensor are.
///
/// # Errors
/// What torch raises: the tensor is sparse, or has no memory of its own.
fn layout(tensor: &Bound<'_, PyAny>) -> PyResult<Layout> {
    let py = tensor.py();
    let read = reader(py)?;
    let mut found = DlTensor::EMPTY;
    // SAFETY: torch's function takes an object, which lives, and fills in the struct of `dlpack.h`.
    if unsafe { read(tensor.as_ptr().cast(), &mut found) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let (mut numel, mut is_contiguous) = (1_i64, true);
    for dim in (0..usize::try_from(found.ndim).unwrap_or(0)).rev() {
        // SAFETY: there are `ndim` of both, and they live as long as the tensor.
        let (size, stride) = unsafe { (*found.shape.add(dim), *found.strides.add(dim)) };
        is_contiguous &= size == 1 || stride == numel;
        numel *= size;
    }
    let dtype = match (found.dtype.code, found.dtype.bits) {
        (DlType::FLOAT, 32) => Some(Dtype::Float32),
        (DlType::FLOAT, 16) => Some(Dtype::Float16),
        (DlType::BFLOAT, 16) => Some(Dtype::BFloat16),
        _ => None,
    };
    Ok(Layout {
        address: found.data as usize + found.byte_offset as usize,
        dtype,
        numel: numel as usize,
        is_contiguous: is_contiguous || numel == 0,
        is_cpu: found.device_type == DlTensor::CPU,
    })
}

/// The memory of a tensor: that stays where another is given to it.
pub(super) fn storage(tensor: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    Ok(tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?.unbind())
}

// ---- dlpack.h, version 1 ----

/// `DLDataType`.
#[repr(C)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DlType {
    const FLOAT: u8 = 2;
    const BFLOAT: u8 = 4;
}

/// `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DlType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

impl DlTensor {
    const CPU: i32 = 1;
    const EMPTY: Self = Self {
        data: ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        dtype: DlType { code: 0, bits: 0, lanes: 0 },
        shape: ptr::null(),
        strides: ptr::null(),
        byte_offset: 0,
    };
}

/// `DLPackDLTensorFromPyObjectNoSync`: fills in the struct, or sets an error and returns another
/// number than 0. It takes no part of the tensor's ownership.
type Read = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// `DLPackExchangeAPI`.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    older: *const Table,
    allocate: *const c_void,
    owned: *const c_void,
    to_object: *const c_void,
    read: Option<Read>,
    stream: *const c_void,
}

const TABLE: &CStr = c"dlpack_exchange_api";
const MAJOR: u32 = 1;

/// torch's function that reads a tensor.
fn reader(py: Python<'_>) -> PyResult<Read> {
    static READER: PyOnceLock<Read> = PyOnceLock::new();
    READER
        .get_or_try_init(py, || {
            let tensor = py.import("torch")?.getattr("Tensor")?;
            let capsule = tensor.getattr("__dlpack_c_exchange_api__")?.cast_into::<PyCapsule>()?;
            let mut table = capsule.pointer_checked(Some(TABLE))?.as_ptr() as *const Table;
            // SAFETY: a capsule of this name has such a table, whose first fields all versions
            // have, and which lives as long as the process.
            while let Some(this) = unsafe { table.as_ref() } {
                if this.major == MAJOR
                    && let Some(read) = this.read
                {
                    return Ok(read);
                }
                table = this.older;
            }
            Err(Error::value(format!(
                "torch hands out no DLPack of version {MAJOR}, expected it to. hint: a torch that \
                 this release of Stepwell names in its metadata"
            ))
            .into())
        })
        .copied()
}
