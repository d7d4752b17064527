//! The ceiling of a streaming kernel on this machine: the same streams, chunks and threads, and
//! next to no arithmetic.

use std::time::{Duration, Instant};

use crate::{
    error::{Error, Result},
    host::{
        memory::{Buffer, BufferConfig},
        pool::Pool,
    },
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    state::chunk::{CHUNK_LEN, Chunk},
    stream::{
        BLOCK,
        cursor::{Cursor, Source},
    },
};

/// Bytes per element of the streams of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Read and written in place.
    pub read_write: Vec<usize>,
    /// Only read.
    pub read: Vec<usize>,
    /// Only written.
    pub write: Vec<usize>,
}

struct Touch<'a> {
    blocks: usize,
    read_write: Vec<(usize, Cursor<'a, u32>)>,
    read: Vec<(usize, Source<'a, u32>)>,
    write: Vec<(usize, Cursor<'a, u32>)>,
}

impl Kernel for Touch<'_> {
    type Output = u32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u32 {
        let mut seen = simd.splat_u(1);
        for block in 0..self.blocks {
            for (bytes, stream) in &self.read {
                stream.prefetch(block * bytes * LANES, bytes * LANES);
                for i in 0..*bytes {
                    seen = simd.xor(seen, stream.load(simd, (block * bytes + i) * LANES, LANES));
                }
            }
            for (bytes, stream) in &self.read_write {
                stream.prefetch(block * bytes * LANES, bytes * LANES);
                for i in 0..*bytes {
                    let at = (block * bytes + i) * LANES;
                    stream.store(simd, at, LANES, simd.add_u(stream.load(simd, at, LANES), seen));
                }
            }
            for (bytes, stream) in &self.write {
                for i in 0..*bytes {
                    stream.store(simd, (block * bytes + i) * LANES, LANES, seen);
                }
            }
        }
        simd.max_lane(seen)
    }
}

/// The time of one pass over `numel` elements (rounded down to whole blocks), after `warmups`
/// passes: the median of `passes`.
///
/// # Errors
/// [`Error::Value`] for no elements or no streams; [`Error::Os`] where there is no memory for them.
pub fn measure(
    pool: &Pool,
    isa: Isa,
    numel: usize,
    streams: &Streams,
    warmups: usize,
    passes: usize,
) -> Result<Duration> {
    let numel = numel / BLOCK * BLOCK;
    let all = || streams.read_write.iter().chain(&streams.read).chain(&streams.write);
    if numel == 0 || passes == 0 || all().count() == 0 || all().any(|&bytes| bytes == 0) {
        return Err(Error::value(format!(
            "`{passes}` passes over `{numel}` elements of {streams:?}, expected at least one pass, \
             one block of {BLOCK} elements and streams of whole bytes"
        )));
    }
    let buffer = |&bytes: &usize| -> Result<(usize, Buffer)> {
        let nbytes = numel.checked_mul(bytes).ok_or_else(|| {
            Error::value(format!(
                "a stream has `{bytes}` bytes for each of {numel} elements, expected streams that \
                 fit into memory"
            ))
        })?;
        Ok((bytes, Buffer::new(nbytes, &BufferConfig::default(), pool)?))
    };
    let buffers = |bytes: &[usize]| bytes.iter().map(buffer).collect::<Result<Vec<_>>>();
    let (read_write, read, write) =
        (buffers(&streams.read_write)?, buffers(&streams.read)?, buffers(&streams.write)?);
    let chunks = Chunk::all([numel].into_iter());
    let mut times = Vec::new();
    for pass in 0..warmups.saturating_add(passes) {
        let started = Instant::now();
        pool.run(chunks.len(), &|task| {
            let range = chunks[task].range(numel);
            let words = |(bytes, buffer): &(usize, Buffer)| {
                let first = range.start * bytes / 4;
                let len = range.len() * bytes / 4;
                // SAFETY: the words of this chunk lie within the buffer (numel * bytes long,
                // page-aligned), and no other task has the same chunk.
                (*bytes, unsafe {
                    std::slice::from_raw_parts_mut(buffer.as_ptr().cast::<u32>().add(first), len)
                })
            };
            let cursor = |(bytes, words)| (bytes, Cursor::in_place(words));
            let touch = Touch {
                blocks: range.len() / BLOCK,
                read_write: read_write.iter().map(words).map(cursor).collect(),
                read: read
                    .iter()
                    .map(words)
                    .map(|(bytes, words)| (bytes, Source::new(&*words)))
                    .collect(),
                write: write.iter().map(words).map(cursor).collect(),
            };
            std::hint::black_box(isa.run(touch));
        });
        if pass >= warmups {
            times.push(started.elapsed());
        }
    }
    const { assert!(CHUNK_LEN.is_multiple_of(BLOCK)) };
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::pool::PoolConfig;

    #[test]
    fn every_stream_is_touched_and_nonsense_refused() {
        let pool =
            Pool::new(&PoolConfig { threads: Some(1), ..PoolConfig::default() }).expect("a pool");
        let streams = Streams { read_write: vec![4, 2], read: vec![1], write: vec![2] };
        for isa in Isa::available() {
            let time =
                measure(&pool, isa, CHUNK_LEN + 3 * BLOCK + 1, &streams, 1, 3).expect("a time");
            assert!(time > Duration::ZERO);
        }
        let isa = Isa::SCALAR;
        assert!(measure(&pool, isa, 1, &streams, 0, 1).is_err());
        assert!(measure(&pool, isa, 64, &Streams::default(), 0, 1).is_err());
        assert!(
            measure(&pool, isa, 64, &Streams { read: vec![0], ..Streams::default() }, 0, 1)
                .is_err()
        );
    }

    #[test]
    fn a_size_that_wraps_around_is_refused() {
        let pool =
            Pool::new(&PoolConfig { threads: Some(1), ..PoolConfig::default() }).expect("a pool");
        // 2^17 elements of so many bytes are 2^17 bytes, if the product is cut off.
        let streams = Streams { write: vec![(1 << 47) + 1], ..Streams::default() };
        let refused = measure(&pool, Isa::SCALAR, 1 << 17, &streams, 0, 1);
        let message = refused.expect_err("too large").to_string();
        assert!(message.contains("140737488355329") && message.contains("fit"), "{message}");
    }
}
