//! The configuration of a data-parallel job.

#[cfg(feature = "tcp")]
use dist_collectives::{Communicator, Config};
use serde::{Deserialize, Serialize};

use crate::Aggregation;
#[cfg(feature = "tcp")]
use crate::{Error, GradientAggregator, Result};

/// The configuration of a process in a data-parallel job, for example in a file. It does not contain the job's
/// secret: set it in the environment or in [`world`](Self::world).
///
/// ```
/// use dist_parallel::own_loop::{Aggregation, DataParallelConfig};
///
/// let config = DataParallelConfig {
///     world_size: 1,
///     rank: 0,
///     coordinator: "127.0.0.1:29500".to_owned(),
///     aggregation: Aggregation::ParameterServer { server: 0 },
/// };
/// let mut aggregator = config.connect()?;
/// let mut gradient = vec![1.0_f32, 2.0];
/// aggregator.aggregate(&mut [gradient.as_mut_slice().into()])?;
/// # Ok::<_, dist_parallel::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataParallelConfig {
    /// The number of processes.
    pub world_size: usize,
    /// The number of this process.
    pub rank: usize,
    /// The address of the coordinator, which rank 0 hosts, as `host:port`.
    pub coordinator: String,
    /// The averaging of gradients.
    #[serde(default)]
    pub aggregation: Aggregation,
}

#[cfg(feature = "tcp")]
impl DataParallelConfig {
    /// Returns the configuration of the world. You can add a secret and a timeout before [`Communicator::join`].
    ///
    /// # Errors
    /// There is no such rank, also if the world size is 0.
    pub fn world(&self) -> Result<Config> {
        Config::new(self.rank, self.world_size, &self.coordinator)
            .map_err(|source| Error::communication(dist_collectives::Error::Join(source.into())))
    }

    /// Joins the world and returns the aggregator for its ranks. [`Aggregation::Local`] joins nothing.
    ///
    /// # Errors
    /// The configuration is invalid, which is found before waiting for other ranks, or the ranks do not connect.
    pub fn connect(&self) -> Result<Box<dyn GradientAggregator>> {
        let &Self { world_size, aggregation, .. } = self;
        let world = self.world()?;
        match aggregation {
            Aggregation::Local => return Ok(Box::new(crate::LocalAggregator)),
            Aggregation::ParameterServer { server } if server >= world_size => {
                return Err(Error::NoSuchServer { server, world_size });
            }
            Aggregation::ParameterServer { .. } | Aggregation::AllReduce => {}
        }
        aggregation.over(Communicator::join(&world).map_err(Error::communication)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(aggregation: Aggregation) -> DataParallelConfig {
        DataParallelConfig { world_size: 2, rank: 1, coordinator: "localhost:9".to_owned(), aggregation }
    }

    #[cfg(feature = "tcp")]
    #[test]
    fn an_invalid_configuration_is_refused_before_waiting_for_ranks() {
        let server = config(Aggregation::ParameterServer { server: 2 }).connect().map(drop);
        assert!(matches!(server, Err(Error::NoSuchServer { server: 2, world_size: 2 })), "{server:?}");
        for (rank, world_size) in [(0, 0), (2, 2)] {
            let config = DataParallelConfig { rank, world_size, ..config(Aggregation::Local) };
            assert!(matches!(config.connect().map(drop), Err(Error::Communication(_))));
        }
        assert!(config(Aggregation::Local).connect().is_ok(), "a local configuration joins no job");
    }

    #[test]
    fn a_configuration_is_read_as_it_is_written() {
        for aggregation in
            [Aggregation::Local, Aggregation::AllReduce, Aggregation::ParameterServer { server: 1 }]
        {
            let text = serde_json::to_string(&config(aggregation)).unwrap();
            assert_eq!(serde_json::from_str::<DataParallelConfig>(&text).unwrap(), config(aggregation));
        }
        let short = r#"{"world_size": 2, "rank": 1, "coordinator": "localhost:9"}"#;
        let read: DataParallelConfig = serde_json::from_str(short).unwrap();
        assert_eq!(read, config(Aggregation::AllReduce));
        let sparse = crate::SparseGradient::largest(&[1.0, f32::MIN_POSITIVE, -3.5], 0.5).unwrap();
        let text = serde_json::to_string(&sparse).unwrap();
        assert_eq!(serde_json::from_str::<crate::SparseGradient>(&text).unwrap(), sparse);
    }
}
