//! A read or write in flight, as the caller has it.

use std::{path::PathBuf, sync::Arc, time::Duration};

use rustix::io::Errno;

use super::{
    buffers::RecordBuffer,
    format::{self, Entry, Extents, VolumeId},
    geometry::Geometry,
    request::{Purpose, Request},
};
use crate::{Error, Result, tier::io::queue::Failure};

/// What errors say of a volume.
#[derive(Debug)]
pub(super) struct About {
    pub(super) id: VolumeId,
    pub(super) name: String,
    pub(super) paths: Vec<PathBuf>,
    pub(super) geometry: Geometry,
    pub(super) extents: Vec<Extents>,
}

impl About {
    /// Where a slot of a record lies, for people.
    fn place(&self, record: usize, entry: &Entry) -> String {
        let pieces: Vec<String> = self
            .geometry
            .pieces(record)
            .iter()
            .map(|piece| {
                let member = usize::from(piece.member);
                format!(
                    "member `{member}` ({}), offset `{}`, {} bytes",
                    self.paths[member].display(),
                    self.extents[member].slot_offset(entry.slot) + piece.offset,
                    piece.nbytes
                )
            })
            .collect();
        pieces.join(" and ")
    }

    /// Bytes of a record on the members.
    pub(super) fn stored_nbytes(&self, record: usize) -> usize {
        self.geometry.pieces(record).iter().map(|piece| piece.nbytes as usize).sum()
    }

    /// Whether what was read is the record.
    fn verify(&self, record: usize, entry: &Entry, buffer: &RecordBuffer) -> Result<()> {
        let stored = &buffer.as_slice()[..self.stored_nbytes(record)];
        format::verify(stored, self.id, record, entry).map_err(|what| {
            Error::os(
                format!(
                    "record `{record}` of volume `{}` is not what step `{}` has written: {what}; \
                     {}",
                    self.name,
                    entry.step,
                    self.place(record, entry)
                ),
                Errno::BADMSG,
            )
        })
    }

    pub(super) fn failed(&self, what: &str, step: Option<u64>, failure: Failure) -> Error {
        let Failure { queue: member, offset, error } = failure;
        let step = step.map_or("none".to_owned(), |step| step.to_string());
        Error::os(
            format!(
                "cannot {what} volume `{}`: member `{member}` ({}), offset `{offset}`, step \
                 `{step}`",
                self.name,
                self.paths[member].display(),
            ),
            error,
        )
    }
}

/// A read or write in flight. Dropping it lets the request end by itself.
#[derive(Debug)]
pub struct Ticket {
    pub(super) about: Arc<About>,
    /// Until its outcome has been given.
    pub(super) request: Option<Arc<Request>>,
}

impl Ticket {
    /// Whether [`Ticket::wait`] returns at once.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.request.as_ref().is_none_or(|request| request.is_over())
    }

    /// Waits for it, up to `timeout`: nothing is returned where it takes longer, and the caller
    /// waits again. Once it is over, gives the buffer back; after a read it holds the record.
    ///
    /// # Errors
    /// [`Error::Os`] where the drive failed, or what was read is not the record (`EBADMSG`);
    /// [`Error::Value`] where the outcome was given before.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<RecordBuffer>> {
        let Some(request) = &self.request else {
            return Err(Error::value(
                "a ticket is waited for again, expected once\nhint: keep what \
                the first wait has returned",
            ));
        };
        let Some(outcome) = request.wait(timeout) else { return Ok(None) };
        let about = &self.about;
        let request = Arc::clone(request);
        self.request = None;
        let (what, record, entry) = match &request.purpose {
            Purpose::Read { record, entry } => ("read", *record, entry),
            Purpose::Write { record, entry } => ("write", *record, entry),
            // Its caller waits without a ticket.
            Purpose::Index { .. } | Purpose::Sync => return Ok(None),
        };
        let failed = |failure| {
            about.failed(&format!("{what} record `{record}` of"), Some(entry.step), failure)
        };
        let buffer = outcome.map_err(failed)?;
        if let (Purpose::Read { .. }, Some(buffer)) = (&request.purpose, &buffer) {
            about.verify(record, entry, buffer)?;
        }
        Ok(buffer)
    }
}
