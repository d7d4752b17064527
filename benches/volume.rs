//! How fast a volume moves records: raw, without a step between.
//!
//! ```text
//! cargo bench --bench volume -- FOLDER... [--weights 400,400,200] [--record-kib 644]
//!     [--records 512] [--buffers 32] [--depth 32] [--stripe-kib 1024] [--seconds 5]
//!     [--engine auto|io_uring|positional] [--durability none|commit] [--flush-mib 256]
//! ```
//!
//! Each folder is a member. Without drives, a few records move in a temporary one: then it is only
//! tried that it works. Rows are of what moves at once:
//!
//! | row | what is in flight |
//! |---|---|
//! | write | writes of one record after the other, again and again; a commit after the last one |
//! | read | reads |
//! | swap | as a step does: a record is read, and written when it is there |
//!
//! MB are 10^6 bytes, with trailers and padding. A row ends when all that was begun has ended.

use std::{error::Error, io::Write, path::PathBuf, sync::atomic::AtomicBool, time::Instant};

use stepwell::{
    host::pool::{Pool, PoolConfig},
    tier::volume::{
        Durability, EngineKind, Location, Options, Shape, Volume,
        passes::{Passes, Pattern},
        unique_name,
    },
};

struct Arguments {
    drives: Vec<PathBuf>,
    weights: Vec<u32>,
    record_kib: usize,
    records: usize,
    buffers: usize,
    depth: usize,
    stripe_kib: usize,
    seconds: f64,
    engine: EngineKind,
    durability: Durability,
    flush_bytes: u64,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> std::result::Result<Self, Box<dyn Error>> {
        let mut found = Self {
            drives: Vec::new(),
            weights: Vec::new(),
            record_kib: 644,
            records: 512,
            buffers: 32,
            depth: 32,
            stripe_kib: 1024,
            seconds: 5.0,
            engine: EngineKind::Auto,
            durability: Durability::None,
            flush_bytes: Options::default().flush_bytes,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("`{word}` without a value"));
            match word.as_str() {
                // Of cargo.
                "--bench" => {}
                "--weights" => {
                    let weights = value()?;
                    found.weights = weights
                        .split(',')
                        .map(str::parse)
                        .collect::<std::result::Result<_, _>>()?;
                }
                "--record-kib" => found.record_kib = value()?.parse()?,
                "--records" => found.records = value()?.parse()?,
                "--buffers" => found.buffers = value()?.parse()?,
                "--depth" => found.depth = value()?.parse()?,
                "--stripe-kib" => found.stripe_kib = value()?.parse()?,
                "--flush-mib" => found.flush_bytes = value()?.parse::<u64>()? << 20,
                "--seconds" => found.seconds = value()?.parse()?,
                "--engine" => {
                    found.engine = match value()?.as_str() {
                        "auto" => EngineKind::Auto,
                        "io_uring" => EngineKind::IoUring,
                        "positional" => EngineKind::Positional,
                        other => return Err(format!("engine `{other}`").into()),
                    }
                }
                "--durability" => {
                    found.durability = match value()?.as_str() {
                        "none" => Durability::None,
                        "commit" => Durability::Commit,
                        other => return Err(format!("durability `{other}`").into()),
                    }
                }
                flag if flag.starts_with('-') => return Err(format!("argument `{flag}`").into()),
                folder => found.drives.push(folder.into()),
            }
        }
        Ok(found)
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = Arguments::parse(std::env::args().skip(1))?;
    let temporary = tempfile::tempdir()?;
    if arguments.drives.is_empty() {
        arguments = Arguments {
            drives: vec![temporary.path().to_owned()],
            records: 4,
            buffers: 3,
            seconds: 0.0,
            ..arguments
        };
    }
    let location = Location { name: unique_name()?, drives: arguments.drives };
    let shape = Shape {
        weights: arguments.weights,
        stripe_bytes: arguments.stripe_kib << 10,
        durability: arguments.durability,
        ..Shape::new(vec![arguments.record_kib << 10; arguments.records])
    };
    let options = Options {
        engine: arguments.engine,
        queue_depth: arguments.depth,
        num_buffers: arguments.buffers,
        flush_bytes: arguments.flush_bytes,
        ..Options::default()
    };
    let pool = Pool::new(&PoolConfig::default())?;
    let begin = Instant::now();
    let volume = Volume::create(&location, &shape, &options, &pool)?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{} members, {} records of {} KiB, made in {:.2} s; io_uring {}, O_DIRECT {}",
        location.drives.len(),
        arguments.records,
        arguments.record_kib,
        begin.elapsed().as_secs_f64(),
        volume.has_rings(),
        volume.is_direct()
    )?;
    let goes_on = AtomicBool::new(false);
    let mut run = Passes::new(volume, arguments.buffers, options.io_timeout, &goes_on)?;
    for (row, pattern) in
        [("write", Pattern::Write), ("read", Pattern::Read), ("swap", Pattern::Swap)]
    {
        let (read, written) = run.volume().bytes_moved();
        let committing = run.committing();
        let mut passes = 0;
        let begin = Instant::now();
        loop {
            run.pass(pattern, &goes_on)?;
            passes += 1;
            if begin.elapsed().as_secs_f64() >= arguments.seconds {
                break;
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        let after = run.volume().bytes_moved();
        let rate = |nbytes: u64| nbytes as f64 / 1e6 / seconds;
        writeln!(
            out,
            "{row:5} read {:8.1} MB/s, written {:8.1} MB/s; {passes} passes in {seconds:.2} s, of \
             which {:.2} s in commits",
            rate(after.0 - read),
            rate(after.1 - written),
            (run.committing() - committing).as_secs_f64()
        )?;
    }
    Ok(())
}
