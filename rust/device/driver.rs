//! The CUDA driver: loading it, what it gives out, and what it says where it fails.

use std::{panic::catch_unwind, sync::OnceLock};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

use crate::error::{Error, Result};

/// Loads the driver, once.
pub(super) fn load() -> Result<()> {
    static DRIVER: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let loaded = DRIVER.get_or_init(|| {
        // SAFETY: loads the driver's library, whose constructors run in every CUDA program.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcuda.so.1 is not to be found".to_owned());
        }
        // The loader panics where a symbol is missing.
        match catch_unwind(result::init) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("the driver does not start: {error}")),
            Err(_) => Err("the driver is too old, expected CUDA 11.4 or later".to_owned()),
        }
    });
    loaded.clone().map_err(|what| {
        Error::os(
            "no CUDA; hint: see `nvidia-smi` and `stepwell doctor`",
            std::io::Error::other(what),
        )
    })
}

/// A pointer that the driver gave out.
#[derive(Clone, Copy)]
pub(super) struct Handle<T>(pub(super) T);

// SAFETY: the driver's objects may be used from any thread whose current context is theirs (CUDA
// Driver API, "Context management"), which `attach` sees to; an event is recorded by one thread at
// a time, as the trait asks, or under a lock.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// What the driver says of a call that failed; `what` it was to do.
pub(super) fn failed(what: &str) -> impl FnOnce(DriverError) -> Error + '_ {
    move |error| {
        let text = error
            .error_string()
            .map_or_else(|_| "unknown".into(), |text| text.to_string_lossy().into_owned());
        Error::os(
            format!("CUDA failed to {what}"),
            std::io::Error::other(format!("{text} ({:?})", error.0)),
        )
    }
}
