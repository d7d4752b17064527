//! Drives that fail: what stands between a volume and the files of its members. And the engines
//! that move data to and from them.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::io::Errno;
use stepwell::{
    host::io_uring,
    tier::io::{
        EngineKind,
        disk::{Between, Disk},
    },
};

/// After which a wait has failed.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// The ring's, and that of positional calls. Where the kernel has no rings, the second one twice.
pub(crate) fn engines() -> [EngineKind; 2] {
    match io_uring::probe() {
        Ok(()) => [EngineKind::IoUring, EngineKind::Positional],
        Err(error) => {
            eprintln!("skipped: the engine with io_uring, which is not offered here ({error})");
            [EngineKind::Positional; 2]
        }
    }
}

/// Which calls a fault is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Read,
    Write,
    Sync,
    Allocate,
}

/// What a call does in place of what it should.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Effect {
    Fails(Errno),
    /// Does so many bytes at most, and says so.
    Short(usize),
    /// Does the first so many bytes, and says that it has done all.
    Torn(usize),
    /// Changes one bit of what it reads or writes.
    Flips(usize),
    /// Does not return before [`Drives::release`].
    Hangs,
}

/// The faults of all drives of a volume.
#[derive(Default)]
pub(crate) struct Drives {
    state: Mutex<State>,
    released: Condvar,
    /// A call hangs, or a flush has failed.
    began: Condvar,
}

#[derive(Default)]
struct State {
    /// Member, call, how many such calls are let through before, what then happens each time.
    faults: Vec<(usize, Call, usize, Effect)>,
    /// Member and offset of what cannot be read before it is written again.
    bad_blocks: Vec<(usize, u64)>,
    hanging: usize,
    failed_flushes: usize,
    is_released: bool,
}

impl Drives {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// What a volume's options take.
    pub(crate) fn between(self: &Arc<Self>) -> Option<Between> {
        let drives = Arc::clone(self);
        Some(Arc::new(move |member, file| {
            Arc::new(Faulty { drives: Arc::clone(&drives), member, file })
        }))
    }

    /// From the call after the next `after` on.
    pub(crate) fn fault(&self, member: usize, call: Call, after: usize, effect: Effect) {
        lock(&self.state).faults.push((member, call, after, effect));
    }

    /// The block at this offset cannot be read before it is written again.
    pub(crate) fn lose_block(&self, member: usize, offset: u64) {
        lock(&self.state).bad_blocks.push((member, offset));
    }

    fn has_lost(&self, member: usize, offset: u64, nbytes: usize) -> bool {
        let is_there = |at: u64| (offset..offset + nbytes as u64).contains(&at);
        lock(&self.state).bad_blocks.iter().any(|&(of, at)| of == member && is_there(at))
    }

    pub(crate) fn repair(&self) {
        lock(&self.state).faults.clear();
    }

    /// Whether a call hangs, at latest after `timeout`.
    pub(crate) fn hangs(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let state = self.began.wait_timeout_while(state, timeout, |state| state.hanging == 0);
        state.unwrap_or_else(PoisonError::into_inner).0.hanging > 0
    }

    /// Whether a flush has failed, at latest after `timeout`.
    pub(crate) fn has_failed_flush(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let state =
            self.began.wait_timeout_while(state, timeout, |state| state.failed_flushes == 0);
        state.unwrap_or_else(PoisonError::into_inner).0.failed_flushes > 0
    }

    pub(crate) fn release(&self) {
        lock(&self.state).is_released = true;
        self.released.notify_all();
    }

    fn effect(&self, member: usize, call: Call) -> Option<Effect> {
        let mut state = lock(&self.state);
        for (of_member, of_call, after, effect) in &mut state.faults {
            if (*of_member, *of_call) == (member, call) {
                if *after == 0 {
                    return Some(*effect);
                }
                *after -= 1;
            }
        }
        None
    }

    fn hang(&self) {
        let mut state = lock(&self.state);
        state.hanging += 1;
        self.began.notify_all();
        let state = self.released.wait_while(state, |state| !state.is_released);
        state.unwrap_or_else(PoisonError::into_inner).hanging -= 1;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Faulty {
    drives: Arc<Drives>,
    member: usize,
    file: Arc<File>,
}

impl Disk for Faulty {
    fn read_at(&self, memory: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.drives.has_lost(self.member, offset, memory.len()) {
            return Err(Errno::IO.into());
        }
        let effect = self.drives.effect(self.member, Call::Read);
        match effect {
            Some(Effect::Fails(errno)) => return Err(errno.into()),
            Some(Effect::Hangs) => self.drives.hang(),
            _ => {}
        }
        let room = match effect {
            Some(Effect::Short(nbytes) | Effect::Torn(nbytes)) => nbytes.min(memory.len()),
            _ => memory.len(),
        };
        let nbytes = Disk::read_at(&*self.file, &mut memory[..room], offset)?;
        match effect {
            Some(Effect::Flips(bit)) => memory[bit / 8] ^= 1 << (bit % 8),
            Some(Effect::Torn(_)) => return Ok(memory.len()),
            _ => {}
        }
        Ok(nbytes)
    }

    fn write_at(&self, memory: &[u8], offset: u64) -> io::Result<usize> {
        match self.drives.effect(self.member, Call::Write) {
            Some(Effect::Fails(errno)) => return Err(errno.into()),
            Some(Effect::Hangs) => self.drives.hang(),
            Some(Effect::Short(nbytes)) => {
                let nbytes = nbytes.min(memory.len());
                return Disk::write_at(&*self.file, &memory[..nbytes], offset);
            }
            Some(Effect::Torn(nbytes)) => {
                let nbytes = nbytes.min(memory.len());
                if nbytes > 0 {
                    Disk::write_at(&*self.file, &memory[..nbytes], offset)?;
                }
                return Ok(memory.len());
            }
            Some(Effect::Flips(bit)) => {
                let mut flipped = Aligned::of(memory);
                flipped.bytes()[bit / 8] ^= 1 << (bit % 8);
                return Disk::write_at(&*self.file, flipped.bytes(), offset);
            }
            None => {}
        }
        let is_written = |at: u64| (offset..offset + memory.len() as u64).contains(&at);
        lock(&self.drives.state)
            .bad_blocks
            .retain(|&(member, at)| member != self.member || !is_written(at));
        Disk::write_at(&*self.file, memory, offset)
    }

    fn sync(&self) -> io::Result<()> {
        match self.drives.effect(self.member, Call::Sync) {
            Some(Effect::Fails(errno)) => {
                lock(&self.drives.state).failed_flushes += 1;
                self.drives.began.notify_all();
                Err(errno.into())
            }
            Some(Effect::Hangs) => {
                self.drives.hang();
                Ok(())
            }
            _ => Disk::sync(&*self.file),
        }
    }

    fn allocate(&self, nbytes: u64) -> io::Result<()> {
        match self.drives.effect(self.member, Call::Allocate) {
            Some(Effect::Fails(errno)) => Err(errno.into()),
            _ => Disk::allocate(&*self.file, nbytes),
        }
    }
}

const BLOCK: usize = 4096;

/// Bytes at an address that direct I/O takes.
struct Aligned {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Aligned {
    fn of(bytes: &[u8]) -> Self {
        let mut memory = vec![0; bytes.len() + BLOCK];
        let begin = memory.as_ptr().align_offset(BLOCK);
        memory[begin..begin + bytes.len()].copy_from_slice(bytes);
        Self { memory, begin, len: bytes.len() }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.begin..self.begin + self.len]
    }
}

/// Drives with volatile caches, until the power is cut: what was not flushed by then is there in
/// part, block by block, in any of the versions since the last flush.
pub(crate) struct Power {
    state: Mutex<PowerState>,
}

struct PowerState {
    /// Writes and flushes until the cut.
    calls_left: usize,
    files: BTreeMap<usize, Cached>,
}

#[derive(Default)]
struct Cached {
    path: PathBuf,
    /// Of each block written since the last flush: what it was then, and what was written since.
    versions: BTreeMap<u64, Vec<Vec<u8>>>,
}

impl Power {
    /// Which is cut after so many writes and flushes.
    pub(crate) fn new(calls_left: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(PowerState { calls_left, files: BTreeMap::new() }) })
    }

    /// What a volume's options take. The files are those of `path`.
    pub(crate) fn between(self: &Arc<Self>, path: impl Fn(usize) -> PathBuf) -> Option<Between> {
        let power = Arc::clone(self);
        let paths: Vec<PathBuf> = (0..8).map(path).collect();
        Some(Arc::new(move |member, file| {
            let cached = Cached { path: paths[member].clone(), ..Cached::default() };
            lock(&power.state).files.insert(member, cached);
            Arc::new(Powered { power: Arc::clone(&power), member, file })
        }))
    }

    pub(crate) fn is_cut(&self) -> bool {
        lock(&self.state).calls_left == 0
    }

    /// Leaves on the drives what a cut leaves. `choose` is given how many versions of a block there
    /// are.
    pub(crate) fn leave_behind(&self, mut choose: impl FnMut(usize) -> usize) {
        for cached in lock(&self.state).files.values_mut() {
            let file = File::options().write(true).open(&cached.path).expect("a member");
            for (block, versions) in std::mem::take(&mut cached.versions) {
                let version = &versions[choose(versions.len())];
                file.write_all_at(version, block * BLOCK as u64).expect("written");
            }
            file.sync_all().expect("written");
        }
    }
}

struct Powered {
    power: Arc<Power>,
    member: usize,
    file: Arc<File>,
}

impl Powered {
    /// Under the lock, so that a flush is of all writes that have returned.
    fn call<T>(&self, call: impl FnOnce(&mut Cached, &File) -> io::Result<T>) -> io::Result<T> {
        let mut state = lock(&self.power.state);
        if state.calls_left == 0 {
            return Err(Errno::IO.into());
        }
        state.calls_left -= 1;
        call(state.files.get_mut(&self.member).expect("opened"), &self.file)
    }
}

impl Disk for Powered {
    fn read_at(&self, memory: &mut [u8], offset: u64) -> io::Result<usize> {
        Disk::read_at(&*self.file, memory, offset)
    }

    fn write_at(&self, memory: &[u8], offset: u64) -> io::Result<usize> {
        self.call(|cached, file| {
            for (index, new) in memory.chunks(BLOCK).enumerate() {
                let block = offset / BLOCK as u64 + index as u64;
                let mut old = Aligned::of(new);
                Disk::read_at(file, old.bytes(), block * BLOCK as u64)?;
                let versions = cached.versions.entry(block);
                versions.or_insert_with(|| vec![old.bytes().to_vec()]).push(new.to_vec());
            }
            Disk::write_at(file, memory, offset)
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.call(|cached, _| {
            cached.versions.clear();
            Ok(())
        })
    }

    fn allocate(&self, nbytes: u64) -> io::Result<()> {
        Disk::allocate(&*self.file, nbytes)
    }
}
