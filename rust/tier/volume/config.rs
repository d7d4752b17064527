//! What a volume is made of, and how a process uses it: what users choose.

use std::{fmt, path::PathBuf, time::Duration};

use crate::{
    Error, Result,
    tier::io::{EngineKind, disk::Between},
};

/// The most bytes of a record that lie together on one member, unless the user says more or less.
pub const STRIPE_BYTES: usize = 1 << 20;

/// Operations that each drive is given at once, unless the user says more or fewer.
pub const QUEUE_DEPTH: usize = 32;

/// Bytes written to a member after which it is flushed, unless the user says more or less: a tenth
/// of a second of a fast drive.
const FLUSH_BYTES: u64 = 256 << 20;

/// What a step is after a crash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The last committed step is whole. Takes two slots per record.
    #[default]
    Commit,
    /// Steps are written in place, and nothing is left of them.
    None,
}

/// Which volume: its name, and the drives of its members in their order.
#[derive(Clone, Debug)]
pub struct Location {
    /// Letters, digits, `.`, `_` and `-`. [`unique_name`] makes one.
    pub name: String,
    /// One for each member: a folder on it, or a block device.
    pub drives: Vec<PathBuf>,
}

/// What a volume is when it is made, and stays.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The bytes of each record.
    pub record_nbytes: Vec<usize>,
    /// The bandwidth of each member, in any unit; empty where all are alike.
    pub weights: Vec<u32>,
    /// The most bytes of a record that lie together on one member; rounded up to the block.
    pub stripe_bytes: usize,
    /// What a step is after a crash.
    pub durability: Durability,
}

impl Shape {
    /// Of these records, on members that are alike, in stripes of [`STRIPE_BYTES`], with commits.
    #[must_use]
    pub fn new(record_nbytes: Vec<usize>) -> Self {
        Self {
            record_nbytes,
            weights: Vec::new(),
            stripe_bytes: STRIPE_BYTES,
            durability: Durability::Commit,
        }
    }
}

/// How a process uses a volume.
#[derive(Clone)]
pub struct Options {
    /// What moves the bytes.
    pub engine: EngineKind,
    /// Operations that each drive is given at once.
    pub queue_depth: usize,
    /// Buffers for records, each for the largest: the most records in flight, or with the caller.
    pub num_buffers: usize,
    /// Whether the files stay when the volume is closed or dropped.
    pub keep: bool,
    /// Bytes written to a member after which it is flushed while the step goes on, so that the
    /// commit has less to wait for.
    pub flush_bytes: u64,
    /// How long a drive may take to answer where the volume waits by itself: in a commit, at the
    /// end.
    pub io_timeout: Duration,
    /// How long [`super::Volume::open`] waits for the last writes of a process that was killed, and
    /// [`super::Volume::create`] where it takes a device. A caller that has to look for signals
    /// gives little, and tries again.
    pub lock_timeout: Duration,
    /// The committed step that [`super::Volume::open`] goes on from: the last one, or the one
    /// before that, if no record was written since. None: the last one.
    pub step: Option<u64>,
    /// What stands between the volume and its files. It has positional calls.
    pub between: Option<Between>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            engine: EngineKind::Auto,
            queue_depth: QUEUE_DEPTH,
            num_buffers: 16,
            keep: false,
            flush_bytes: FLUSH_BYTES,
            io_timeout: Duration::from_secs(60),
            lock_timeout: Duration::from_secs(60),
            step: None,
            between: None,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("engine", &self.engine)
            .field("queue_depth", &self.queue_depth)
            .field("num_buffers", &self.num_buffers)
            .field("keep", &self.keep)
            .finish_non_exhaustive()
    }
}

/// A name that no other job has: of this process, and random.
///
/// # Errors
/// [`Error::Os`] where the system gives no random bits.
pub fn unique_name() -> Result<String> {
    Ok(format!("{}-{:016x}", std::process::id(), random()? as u64))
}

pub(super) fn random() -> Result<u128> {
    let mut bytes = [0; 16];
    // SAFETY: the kernel writes up to 16 bytes, which there are. Requests this small are not cut
    // short once the kernel has seeded its generator.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        return Err(Error::os("cannot get random bits", std::io::Error::last_os_error()));
    }
    Ok(u128::from_le_bytes(bytes))
}
