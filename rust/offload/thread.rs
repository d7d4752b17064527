//! The engine's threads: how one starts, and what becomes of a panic in it.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    error::{Error, Result},
    sync::thread::{self, JoinHandle},
};

/// Starts a thread. `body` does not panic: see [`caught`].
pub(super) fn start(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(body).map_err(|error| {
        Error::os(format!("cannot start the thread `{name}`; hint: see `ulimit -u`"), error)
    })
}

/// What `body` returns; a panic in it is an error: that `actor` panicked.
pub(super) fn caught<T>(actor: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        Err(Error::os(format!("{actor} panicked"), io::Error::other(text_of(&*payload))))
    })
}

fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_default()
}
