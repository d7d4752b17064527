//! What the environment says of this process: which of a host's ranks it is, as launchers tell it,
//! and how many workers its pool has.

use crate::{Error, Result};

/// The variable that sets the number of workers where the configuration does not.
pub const THREADS_VARIABLE: &str = "STEPWELL_THREADS";

/// What launchers call the rank among those of a host, and their number: torchrun, DeepSpeed, Open
/// MPI, and MPICH with Intel MPI.
pub const LAUNCHERS: [(&str, &str); 4] = [
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
];

/// This process among the ranks of its host, which split the cores and the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankShare {
    /// This process among those that share the host, from 0.
    pub rank: usize,
    /// How many processes share the host.
    pub num_ranks: usize,
}

impl RankShare {
    /// All of it: no other rank on this host.
    pub const WHOLE: Self = Self { rank: 0, num_ranks: 1 };
}

/// What the environment says of this process.
pub(super) struct Environment {
    /// How many workers a pool has.
    pub(super) threads: Option<usize>,
    /// As the launcher has it; `None` where none says.
    pub(super) share: Option<RankShare>,
}

impl Environment {
    /// # Errors
    /// [`Error::Value`] for a variable that is not a count.
    pub(super) fn of_process() -> Result<Self> {
        Self::read(variable)
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = variable(name).filter(|text| !text.trim().is_empty()) else {
                return Ok(None);
            };
            text.trim().parse().map(Some).map_err(|_| {
                Error::value(format!("invalid {name} `{text}`, expected a whole number"))
            })
        };
        let threads = number(THREADS_VARIABLE)?;
        if threads == Some(0) {
            return Err(Error::value(format!(
                "invalid {THREADS_VARIABLE} `0`, expected at least 1; hint: unset it for one \
                 thread per physical core"
            )));
        }
        let mut share = None;
        for (rank, num_ranks) in LAUNCHERS {
            if let (Some(rank), Some(num_ranks)) = (number(rank)?, number(num_ranks)?) {
                share = Some(RankShare { rank, num_ranks });
                break;
            }
        }
        Ok(Self { threads, share })
    }
}

/// What the launcher of this process says of the ranks on this host; `None` where none does.
///
/// # Errors
/// [`Error::Value`] for a variable that is not a count.
pub fn rank_share() -> Result<Option<RankShare>> {
    Environment::of_process().map(|environment| environment.share)
}

/// A variable of the environment.
pub(super) fn variable(name: &str) -> Option<String> {
    Some(std::env::var_os(name)?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment> {
        Environment::read(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn environment_is_read() {
        let environment =
            read(&[("STEPWELL_THREADS", " 3 "), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")])
                .expect("valid");
        assert_eq!(environment.threads, Some(3));
        assert_eq!(environment.share, Some(RankShare { rank: 1, num_ranks: 4 }));
        let alone = read(&[("STEPWELL_THREADS", ""), ("LOCAL_RANK", "1")]).expect("valid");
        assert_eq!((alone.threads, alone.share), (None, None));
    }

    #[test]
    fn every_launcher_is_heard() {
        for (rank, num_ranks) in LAUNCHERS {
            let share = read(&[(rank, "1"), (num_ranks, "2")]).expect("valid").share;
            assert_eq!(share, Some(RankShare { rank: 1, num_ranks: 2 }), "{num_ranks}");
        }
        let torchrun_first = [("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_SIZE", "2")];
        let share = read(&torchrun_first).expect("valid").share;
        assert_eq!(share, Some(RankShare { rank: 0, num_ranks: 4 }));
    }

    #[test]
    fn nonsense_is_named() {
        for value in ["0", "-1", "two", "1.5", "99999999999999999999"] {
            let Err(error) = read(&[("STEPWELL_THREADS", value)]) else {
                panic!("`{value}` was taken")
            };
            let message = error.to_string();
            assert!(
                message.contains("STEPWELL_THREADS") && message.contains(&format!("`{value}`")),
                "{message}"
            );
        }
    }
}
