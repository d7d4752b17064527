//! Whether the kernel offers io_uring to this process.

use std::io;

/// Asks the kernel for the smallest ring and gives it back.
///
/// # Errors
/// The kernel's answer: `ENOSYS` where it is not built in, `EPERM` where a sysctl or a container's
/// filter forbids it.
pub fn probe() -> io::Result<()> {
    // struct io_uring_params is 120 bytes; all zero asks for the defaults.
    let mut params = [0_u64; 15];
    // SAFETY: the kernel reads and writes 120 bytes at `params`, which is that long, and returns a
    // descriptor or -1.
    let descriptor = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1_u32, params.as_mut_ptr()) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is ours, just made, and closed once.
    unsafe { libc::close(descriptor as i32) };
    Ok(())
}
