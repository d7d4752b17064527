//! `stepwell._core`: the extension module. Its files are thin: extract, detach, call, convert. But
//! for `store/`, which knows of a step what Python has bound, and whether it is as it was.

mod adam;
mod device_steps;
mod errors;
mod files;
mod host;
mod interrupt;
mod logging;
mod offload;
mod select;
mod store;
mod swap;
mod tensor;
mod volume_passes;

use pyo3::prelude::*;

/// The compiled core of Stepwell: kernels, state codecs, pool and host memory.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::adam::{
        PyAdamTensor, PyGradStats, PyHyper, PyStatePart, adam_step, grad_stats, master_parts,
        moments_codecs, moments_parts, read_state, take_fingerprints, write_state,
    };
    #[pymodule_export]
    use super::device_steps::PyDeviceSteps;
    #[pymodule_export]
    use super::files::PyFiles;
    #[pymodule_export]
    use super::host::{
        PyAddressSpace, PyBuffer, PyMemoryClaim, PyPool, build_info, connect, free_memory_bytes,
        num_chunks, places_of_ranks, stream_ceiling, system_info,
    };
    #[pymodule_export]
    use super::offload::{PyOffloadEngine, py_deferral_nbytes};
    #[pymodule_export]
    use super::select::{PySelectable, choose_channels, py_selection_nbytes};
    #[pymodule_export]
    use super::store::{PyLook, PyStore};
    #[pymodule_export]
    use super::swap::{
        PyMemberFile, PySwap, check_volume, format_device, list_members, remove_volume,
        swap_buffers_nbytes,
    };
    #[pymodule_export]
    use super::tensor::PyTensorView;
    #[pymodule_export]
    use super::volume_passes::PyVolumePasses;

    /// Elements per chunk: what a worker takes at a time, and what one fingerprint covers.
    #[pymodule_export]
    const CHUNK_LEN: usize = crate::state::chunk::CHUNK_LEN;
    /// The most bytes of a record that lie together on one drive of a volume, if nothing is said.
    #[pymodule_export]
    const STRIPE_BYTES: usize = crate::tier::volume::STRIPE_BYTES;
    /// The largest stripe.
    #[pymodule_export]
    const STRIPE_BYTES_MAX: usize = crate::tier::volume::geometry::STRIPE_BYTES_MAX;
    /// Reads and writes that each drive of a volume is given at once, where nothing is said.
    #[pymodule_export]
    const QUEUE_DEPTH: usize = crate::tier::volume::QUEUE_DEPTH;
    /// The most reads and writes that a drive is given at once.
    #[pymodule_export]
    const QUEUE_DEPTH_MAX: usize = crate::tier::io::QUEUE_DEPTH_MAX;
    /// The largest weight of a drive of a volume.
    #[pymodule_export]
    const DRIVE_WEIGHT_MAX: u32 = crate::tier::volume::geometry::WEIGHT_MAX;
    /// How many sums the checksum of a tensor has.
    #[pymodule_export]
    const CHECKSUM_SUMS: usize = crate::device::CHECKSUM_SUMS;
    /// Elements of a segment, but for a tensor's last: what is uploaded at once, and what one
    /// checksum covers.
    #[pymodule_export]
    const SEGMENT_LEN: usize = crate::offload::SEGMENT_LEN;
    /// What the bytes of coded state mean: trailing bits, fingerprints, q8 codes and scales. State
    /// dicts of another number are refused.
    #[pymodule_export]
    const STATE_FORMAT: u32 = crate::state::STATE_FORMAT;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
