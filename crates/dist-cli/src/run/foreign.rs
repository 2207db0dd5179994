//! Launchers that tell processes their ranks by other names: what is started by one of them, several times, must not take
//! itself for alone.

use crate::Error;

/// By what a launcher tells a process how many there are, and which of them it is.
struct Names {
    size: &'static str,
    rank: &'static str,
}

/// Of Open MPI, of MPICH and what comes from it, and of a step of Slurm: a batch script, which runs once, has none of these.
const LAUNCHERS: [Names; 3] = [
    Names { size: "OMPI_COMM_WORLD_SIZE", rank: "OMPI_COMM_WORLD_RANK" },
    Names { size: "PMI_SIZE", rank: "PMI_RANK" },
    Names { size: "SLURM_STEP_NUM_TASKS", rank: "SLURM_PROCID" },
];

/// Says, where such a launcher has started several of this process, what each of them lacks to be a rank.
pub(super) fn refuse() -> Result<(), Error> {
    refuse_by(|name| std::env::var(name).ok())
}

fn refuse_by(variable: impl Fn(&str) -> Option<String>) -> Result<(), Error> {
    let count =
        |names: &&Names| variable(names.size).and_then(|size| size.parse().ok()).is_some_and(|n: u64| n > 1);
    let Some(Names { size, rank }) = LAUNCHERS.iter().find(count) else { return Ok(()) };
    Err(Error::Usage(format!(
        "this was started several times ({size}), and each would start a job of its own: \
         set MASTER_ADDR and MASTER_PORT, and RANK=${rank} and WORLD_SIZE=${size} in a shell around each"
    )))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&[], None)]
    #[case(&[("OMPI_COMM_WORLD_SIZE", "4")], Some("RANK=$OMPI_COMM_WORLD_RANK and WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"))]
    #[case(&[("PMI_SIZE", "2")], Some("RANK=$PMI_RANK and WORLD_SIZE=$PMI_SIZE"))]
    #[case(&[("SLURM_STEP_NUM_TASKS", "2")], Some("RANK=$SLURM_PROCID"))]
    #[case::a_batch_script(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")], None)]
    #[case::a_step_of_one(&[("SLURM_STEP_NUM_TASKS", "1"), ("OMPI_COMM_WORLD_SIZE", "1")], None)]
    fn processes_that_others_start_together_are_told_what_to_set(
        #[case] variables: &[(&str, &str)],
        #[case] words: Option<&str>,
    ) {
        let get = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let told = refuse_by(get).err().map(|error| error.to_string());
        assert_eq!(told.is_some(), words.is_some(), "{told:?}");
        assert!(told.unwrap_or_default().contains(words.unwrap_or_default()));
    }
}
