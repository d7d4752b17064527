//! What becomes of a panic on a thread of the process.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::error::{Error, Result};

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
