//! What an engine asks of a file.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::Arc,
};

use rustix::{
    fs::{FallocateFlags, OFlags},
    io::Errno,
};

/// Positional I/O on one file, from several threads at once. Calls may do less than they are asked
/// for; the caller goes on where they ended. On a volume offsets, sizes and addresses are multiples
/// of its block.
pub trait Disk: Send + Sync {
    /// Reads from here on. Zero bytes are the end of the file.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, memory: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes from here on.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, memory: &[u8], offset: u64) -> io::Result<usize>;

    /// What was written before is durable when this returns.
    ///
    /// # Errors
    /// The system's. Nothing is known then of what was written since the call before.
    fn sync(&self) -> io::Result<()>;

    /// Takes the space of the file's first `nbytes`, which are zeros where nothing was written.
    ///
    /// # Errors
    /// The system's, such as `ENOSPC`.
    fn allocate(&self, nbytes: u64) -> io::Result<()>;
}

impl Disk for File {
    fn read_at(&self, memory: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, memory, offset)
    }

    fn write_at(&self, memory: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, memory, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn allocate(&self, nbytes: u64) -> io::Result<()> {
        loop {
            match rustix::fs::fallocate(self, FallocateFlags::empty(), 0, nbytes) {
                Err(Errno::INTR) => {}
                // Where space cannot be reserved, it is taken by writing.
                Err(Errno::OPNOTSUPP) => return write_zeros(self, nbytes),
                done => return Ok(done?),
            }
        }
    }
}

/// Through the page cache, whose memory may have any address.
fn write_zeros(file: &File, nbytes: u64) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT)?;
    let zeros = vec![0; 1 << 20];
    let mut offset = 0;
    while offset < nbytes {
        let rest = usize::try_from(nbytes - offset).unwrap_or(usize::MAX);
        file.write_all_at(&zeros[..rest.min(zeros.len())], offset)?;
        offset += rest.min(zeros.len()) as u64;
    }
    file.sync_data()?;
    Ok(rustix::fs::fcntl_setfl(file, flags)?)
}

/// Opens a file whose bytes have offsets. Anything else is refused, and never waited for, as the
/// other end of a FIFO would be.
pub(in crate::tier) fn open_regular(path: &Path, how: &mut OpenOptions) -> io::Result<File> {
    let file = how.custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        let what = "it is no regular file, but a FIFO, a device or the like";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    // A ring would give up reads that have to wait for the drive.
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// What stands between an engine and a file, such as one that injects faults. It is given the
/// number of the member (0 where there are none) and its file.
pub type Between = Arc<dyn Fn(usize, Arc<File>) -> Arc<dyn Disk> + Send + Sync>;

/// Reads or writes all of it, in as many calls as it takes.
///
/// # Errors
/// The disk's, or `UnexpectedEof` or `WriteZero` where it does nothing.
pub(in crate::tier) fn read_all(disk: &dyn Disk, memory: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < memory.len() {
        done +=
            progress(disk.read_at(&mut memory[done..], offset + done as u64), true, BLOCK_BYTES)?;
    }
    Ok(())
}

/// As [`read_all`].
pub(in crate::tier) fn write_all(disk: &dyn Disk, memory: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < memory.len() {
        done += progress(disk.write_at(&memory[done..], offset + done as u64), false, BLOCK_BYTES)?;
    }
    Ok(())
}

/// How far a call has come, which has returned this: where it has ended within a unit, as far as
/// the unit's beginning. Nothing, and no error, where it is to be tried again.
///
/// # Errors
/// Its own, or `UnexpectedEof` or `WriteZero` where it has done less than a unit.
pub(super) fn progress(
    returned: io::Result<usize>,
    is_read: bool,
    unit_bytes: usize,
) -> io::Result<usize> {
    match returned {
        Ok(nbytes) if nbytes >= unit_bytes => Ok(nbytes / unit_bytes * unit_bytes),
        Ok(_) if is_read => {
            Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends here, it is truncated"))
        }
        Ok(_) => Err(io::Error::new(io::ErrorKind::WriteZero, "nothing was written")),
        Err(error) if is_transient(&error) => Ok(0),
        Err(error) => Err(error),
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw_os_error), Some(Errno::INTR | Errno::AGAIN))
}

/// What drives and page caches read and write as a whole. A volume's block is a multiple of it.
pub(in crate::tier) const BLOCK_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Does little per call, and now and then nothing.
    struct Slow(Mutex<(Vec<u8>, usize)>);

    impl Slow {
        fn some(&self, nbytes: usize) -> io::Result<usize> {
            let calls = &mut self.0.lock().expect("not poisoned").1;
            *calls += 1;
            match *calls % 3 {
                0 => Err(Errno::INTR.into()),
                1 => Ok(nbytes.min(BLOCK_BYTES + 100)),
                _ => Ok(nbytes),
            }
        }
    }

    impl Disk for Slow {
        fn read_at(&self, memory: &mut [u8], offset: u64) -> io::Result<usize> {
            let nbytes = self.some(memory.len())?;
            let content = &self.0.lock().expect("not poisoned").0;
            let end = content.len().min(offset as usize + nbytes);
            let content = &content[offset as usize..end];
            memory[..content.len()].copy_from_slice(content);
            Ok(content.len())
        }

        fn write_at(&self, memory: &[u8], offset: u64) -> io::Result<usize> {
            let nbytes = self.some(memory.len())?;
            let content = &mut self.0.lock().expect("not poisoned").0;
            content[offset as usize..][..nbytes].copy_from_slice(&memory[..nbytes]);
            Ok(nbytes)
        }

        fn sync(&self) -> io::Result<()> {
            Ok(())
        }

        fn allocate(&self, _: u64) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn short_calls_are_gone_on_from_and_a_truncated_file_is_an_error() {
        let disk = Slow(Mutex::new((vec![0; 20 * BLOCK_BYTES], 0)));
        let written: Vec<u8> = (0..9 * BLOCK_BYTES).map(|i| (i / 7) as u8).collect();
        write_all(&disk, &written, 3 * BLOCK_BYTES as u64).expect("written");
        let mut read = vec![0; written.len()];
        read_all(&disk, &mut read, 3 * BLOCK_BYTES as u64).expect("read");
        assert!(read == written);
        let error = read_all(&disk, &mut read, 12 * BLOCK_BYTES as u64).expect_err("too short");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
