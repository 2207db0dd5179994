//! Meshes compared with brute force: the ranks of each group, and their communication.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;

use dist_collectives::{Message, OwnedMessage, ReduceOp};
use dist_groups::{Error, Group, Mesh, Shift, dims_create};
use rstest::rstest;

use crate::worlds::{gathered, run, still};

/// Returns all ways to write a number as a product of this many factors.
fn factors(product: usize, count: usize) -> Vec<Vec<usize>> {
    if count == 1 {
        return vec![vec![product]];
    }
    let divisors = (1..=product).filter(|first| product.is_multiple_of(*first));
    let with = |first: usize| {
        factors(product / first, count - 1).into_iter().map(move |rest| [vec![first], rest].concat())
    };
    divisors.flat_map(with).collect()
}

/// Returns the mesh of every rank, with axes named by their numbers.
fn meshes(degrees: &[usize]) -> Vec<Mesh> {
    let axes = || degrees.iter().enumerate().map(|(axis, &degree)| (axis.to_string(), degree));
    still(degrees.iter().product()).into_iter().map(|comm| Mesh::new(comm, axes()).unwrap()).collect()
}

/// Returns all coordinates of a mesh in the order of their ranks.
fn places(degrees: &[usize]) -> Vec<Vec<usize>> {
    degrees.iter().fold(vec![Vec::new()], |places, &degree| {
        places.iter().flat_map(|place| (0..degree).map(|last| [place.clone(), vec![last]].concat())).collect()
    })
}

/// Returns the ranks that differ from this rank only along these axes, ordered by their coordinates along them.
fn brute_force(degrees: &[usize], axes: &[usize], rank: usize) -> Vec<usize> {
    let places = places(degrees);
    let agrees = |other: &Vec<usize>| {
        (0..degrees.len()).all(|axis| axes.contains(&axis) || other[axis] == places[rank][axis])
    };
    let mut members: Vec<usize> = (0..places.len()).filter(|&other| agrees(&places[other])).collect();
    members.sort_by_key(|&other| axes.iter().map(|&axis| places[other][axis]).collect::<Vec<_>>());
    members
}

/// Checks groups that all ranks have created together: all members agree, and each group has its own channel.
#[track_caller]
fn check_groups(groups: &[Group]) {
    let mut channels = BTreeSet::new();
    for (rank, group) in groups.iter().enumerate() {
        for &member in group.members() {
            assert_eq!(groups[member].members(), group.members(), "ranks {rank} and {member}");
            assert_eq!(groups[member].channel(), group.channel(), "ranks {rank} and {member}");
        }
        channels.insert((group.channel().get(), group.members().to_vec()));
    }
    let distinct: BTreeSet<u64> = channels.iter().map(|(channel, _)| *channel).collect();
    assert_eq!(distinct.len(), channels.len(), "two groups share a channel");
}

#[rstest]
fn every_axis_of_every_shape_agrees_with_brute_force(#[values(1, 2, 3, 4)] axes: usize) {
    for world_size in 1..=24 {
        for degrees in factors(world_size, axes) {
            let mut meshes = meshes(&degrees);
            for (rank, mesh) in meshes.iter().enumerate() {
                assert_eq!(mesh.coordinates(), places(&degrees)[rank], "{degrees:?}");
                assert_eq!(mesh.rank_at(&mesh.coordinates()), Some(rank), "{degrees:?}");
            }
            for axis in 0..axes {
                let name = axis.to_string();
                let groups: Vec<Group> = meshes.iter_mut().map(|mesh| mesh.take(&name).unwrap()).collect();
                for (rank, group) in groups.iter().enumerate() {
                    assert_eq!(group.members(), brute_force(&degrees, &[axis], rank), "{degrees:?} {axis}");
                    assert_eq!(group.rank(), meshes[rank].coordinate(&name).unwrap());
                    assert_eq!(group.world_size(), meshes[rank].degree(&name).unwrap());
                }
                check_groups(&groups);
            }
        }
    }
}

#[rstest]
#[case(&[2, 2, 2], &[0, 1])]
#[case(&[2, 2, 2], &[2, 0])]
#[case(&[3, 2, 4], &[1, 2])]
#[case(&[3, 2, 4], &[2, 1])]
#[case(&[3, 2, 4], &[2, 1, 0])]
#[case(&[1, 5, 1, 3], &[3, 0])]
#[case(&[24], &[0])]
fn a_slice_agrees_with_brute_force_in_the_order_of_the_names(
    #[case] degrees: &[usize],
    #[case] axes: &[usize],
) {
    let names: Vec<String> = axes.iter().map(ToString::to_string).collect();
    let mut meshes = meshes(degrees);
    let slices: Vec<Group> = meshes.iter_mut().map(|mesh| mesh.slice(&names).unwrap()).collect();
    for (rank, slice) in slices.iter().enumerate() {
        assert_eq!(slice.members(), brute_force(degrees, axes, rank));
    }
    check_groups(&slices);
    let parts: Vec<Mesh> = meshes.iter_mut().map(|mesh| mesh.sub_mesh(&names).unwrap()).collect();
    for (rank, part) in parts.iter().enumerate() {
        let expected = axes.iter().map(|&axis| (axis.to_string(), degrees[axis]));
        let found = part.axes().map(|(name, degree)| (name.to_owned(), degree));
        assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        let place: Vec<usize> = axes.iter().map(|&axis| places(degrees)[rank][axis]).collect();
        assert_eq!(part.coordinates(), place);
        assert_eq!((part.rank(), part.world_size()), (slices[rank].rank(), slices[rank].world_size()));
    }
}

#[test]
fn every_group_of_a_mesh_works() {
    run(12, |world| {
        let world = world.fork().unwrap();
        let rank = world.rank() as u64;
        let mut mesh = Mesh::new(world, [("data", 3), ("shard", 2), ("pipeline", 2)]).unwrap();
        let (data, shard, pipeline) = (rank / 4, rank / 2 % 2, rank % 2);
        assert_eq!(gathered(mesh.axis("data").unwrap()), [0, 4, 8].map(|of| of + rank % 4));
        assert_eq!(gathered(mesh.axis("shard").unwrap()), [0, 2].map(|of| of + 4 * data + pipeline));
        let mut last = mesh.take("pipeline").unwrap();
        let mut slice = mesh.slice(["pipeline", "data"]).unwrap();
        assert_eq!(gathered(&mut slice), [0, 4, 8, 1, 5, 9].map(|of| of + 2 * shard));
        let mut part = mesh.sub_mesh(["shard", "data"]).unwrap();
        assert_eq!(part.coordinates(), [shard, data].map(|c| usize::try_from(c).unwrap()));
        assert_eq!(gathered(part.axis("data").unwrap()).len(), 3);
        let mut sum = [1];
        mesh.communicator().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        mesh.into_communicator().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [144]);
        // A taken group outlives the mesh.
        assert_eq!(gathered(&mut last), [0, 1].map(|of| of + rank / 2 * 2));
    });
}

#[test]
fn a_mesh_of_a_group_arranges_the_ranks_of_the_group() {
    run(7, |world| {
        let Some(group) = Group::new(world, &[6, 5, 4, 3, 2, 1]).unwrap() else { return };
        let rank = group.rank();
        let mut mesh = Mesh::new(group.into_communicator(), [("data", 2), ("tensor", 3)]).unwrap();
        let tensor = mesh.axis("tensor").unwrap();
        assert_eq!(tensor.members_in_world(), if rank < 3 { [6, 5, 4] } else { [3, 2, 1] });
        assert_eq!(gathered(tensor), if rank < 3 { [0, 1, 2] } else { [3, 4, 5] });
    });
}

#[rstest]
#[case(&[], "a mesh, or a slice of one, needs at least one axis")]
#[case(&[("data", 6), ("shard", 1), ("data", 1)], "the axis \"data\" is named twice")]
#[case(&[("data", 0), ("shard", 6)], "the axis \"data\" has degree 0: give it at least 1")]
#[case(&[("data", 2), ("shard", 2)], "the degrees data 2 x shard 2 = 4 do not multiply to the 6 ranks of the parent")]
#[case(
    &[("data", usize::MAX), ("shard", 6)],
    "the degrees data 18446744073709551615 x shard 6 = too many do not multiply to the 6 ranks of the parent"
)]
fn axes_that_make_no_mesh_are_refused(#[case] axes: &[(&str, usize)], #[case] message: &str) {
    for comm in still(6) {
        assert_eq!(Mesh::new(comm, axes.iter().copied()).unwrap_err().to_string(), message);
    }
}

#[test]
fn an_unknown_axis_is_named() {
    let unknown = "the mesh has no axis \"dat\": its axes are data, shard";
    let twice = "the axis \"data\" is named twice";
    let taken = "the group of the axis \"data\" was already taken out of the mesh";
    for comm in still(6) {
        let mut mesh = Mesh::new(comm, [("data", 2), ("shard", 3)]).unwrap();
        assert_eq!(mesh.axis("dat").unwrap_err().to_string(), unknown);
        assert_eq!(mesh.take("dat").unwrap_err().to_string(), unknown);
        assert_eq!(mesh.degree("dat").unwrap_err().to_string(), unknown);
        assert_eq!(mesh.coordinate("dat").unwrap_err().to_string(), unknown);
        assert_eq!(mesh.slice(["shard", "dat"]).unwrap_err().to_string(), unknown);
        assert_eq!(mesh.sub_mesh(["data", "data"]).unwrap_err().to_string(), twice);
        assert_eq!(
            mesh.slice([""; 0]).unwrap_err().to_string(),
            "a mesh, or a slice of one, needs at least one axis"
        );
        mesh.take("data").unwrap();
        assert_eq!(mesh.axis("data").unwrap_err().to_string(), taken);
        assert_eq!(mesh.take("data").unwrap_err().to_string(), taken);
        assert_eq!((mesh.coordinates_of(6), mesh.rank_at(&[2, 0]), mesh.rank_at(&[0])), (None, None, None));
    }
}

/// Returns all ways to write a number as a product of this many degrees, in descending order.
fn descending(product: usize, count: usize) -> Vec<Vec<usize>> {
    let all = factors(product, count).into_iter();
    all.filter(|degrees| degrees.is_sorted_by(|one, next| one >= next)).collect()
}

#[test]
fn chosen_degrees_are_those_with_the_smallest_largest_degree() {
    for world_size in 1..=64 {
        for axes in 1..=4 {
            let expected = descending(world_size, axes).into_iter().min().unwrap();
            assert_eq!(dims_create(world_size, &vec![None; axes]).unwrap(), expected);
        }
    }
    assert_eq!(dims_create(1 << 20, &[None, None, None]).unwrap(), [128, 128, 64]);
    assert_eq!(dims_create(12, &[None, Some(2), None]).unwrap(), [3, 2, 2]);
    assert_eq!(dims_create(6, &[Some(2), Some(3)]).unwrap(), [2, 3]);
    let refused: [(usize, &[Option<usize>]); 5] = [
        (6, &[Some(4), None]),
        (6, &[Some(0), None]),
        (6, &[Some(2), Some(2)]),
        (6, &[]),
        (6, &[Some(usize::MAX); 2]),
    ];
    for (world_size, fixed) in refused {
        let error = dims_create(world_size, fixed).unwrap_err();
        assert!(matches!(error, Error::FixedDegrees { .. }), "{error}");
    }
}

/// Returns what a rank receives from its lower and its upper neighbour along each axis, if each rank sends its number, the
/// axis, and the direction.
fn expected_halo(mesh: &Mesh, axes: &[&str]) -> Vec<[u64; 2]> {
    let message = |sender: Option<usize>, axis: usize, direction: u64| {
        sender.map_or(NOTHING, |sender| (sender * 100 + axis * 10) as u64 + direction)
    };
    let halo = |(axis, name): (usize, &&str)| {
        let Shift { from, to } = mesh.shift(name, 1).unwrap();
        [message(from, axis, 1), message(to, axis, 0)]
    };
    axes.iter().enumerate().map(halo).collect()
}

/// The content of memory that receives nothing.
const NOTHING: u64 = u64::MAX;

#[rstest]
fn neighbours_exchange_messages_along_open_and_periodic_axes(
    #[values(vec![1], vec![2], vec![3], vec![2, 2], vec![3, 2], vec![1, 4])] degrees: Vec<usize>,
    #[values(false, true)] is_periodic: bool,
) {
    let world_size = degrees.iter().product();
    run(world_size, move |communicator| {
        let axes = &["x", "y"][..degrees.len()];
        let mesh =
            Mesh::new(communicator.fork().unwrap(), axes.iter().copied().zip(degrees.clone())).unwrap();
        let mut mesh = if is_periodic { mesh.with_periodic(&axes[..1]).unwrap() } else { mesh };
        let own = |axis: usize, direction| [(mesh.rank() * 100 + axis * 10) as u64 + direction];
        let sends: Vec<_> = (0..axes.len()).map(|axis| [own(axis, 0), own(axis, 1)]).collect();
        let sends: Vec<_> = sends.iter().map(|[lower, upper]| [&lower[..], &upper[..]]).collect();
        let mut halo = vec![[[NOTHING]; 2]; axes.len()];
        let mut receives: Vec<_> =
            halo.iter_mut().map(|[lower, upper]| [&mut lower[..], &mut upper[..]]).collect();
        mesh.exchange_with_neighbours(&sends, &mut receives).unwrap();
        let error = mesh.exchange_with_neighbours(&sends, &mut receives[1..]).unwrap_err();
        assert!(matches!(error, Error::Neighbours { .. }), "{error}");
        let halo: Vec<_> = halo.into_iter().map(|sides| sides.map(|[value]| value)).collect();
        assert_eq!(halo, expected_halo(&mesh, axes), "{:?} {degrees:?}", mesh.coordinates());
    });
}

#[test]
fn a_message_beyond_an_open_edge_ends_at_once_and_changes_nothing() {
    run(3, |communicator| {
        let mut mesh = Mesh::new(communicator.fork().unwrap(), [("x", 3)]).unwrap();
        let (own, Shift { from, to }) = ([mesh.rank() as u64], mesh.shift("x", 1).unwrap());
        let comm = mesh.communicator();
        let expected = [from.map_or(NOTHING, |from| from as u64)];
        let mut received = [NOTHING];
        comm.send_recv(&own, to, &mut received, from).unwrap();
        assert_eq!(received, expected);
        received = [NOTHING];
        comm.batch(&mut [Message::receive(from, &mut received), Message::send(to, &own)]).unwrap();
        assert_eq!(received, expected);
        received = [NOTHING];
        comm.send(&own, to).unwrap();
        comm.recv(&mut received, from).unwrap();
        assert_eq!(received, expected);
        received = [NOTHING];
        comm.send(&own, to).unwrap();
        let elements = comm.recv_up_to(&mut received, from).unwrap();
        assert_eq!((elements, received), (from.iter().len(), expected));
        comm.send(&own, to).unwrap();
        assert_eq!(comm.recv_vec::<u64>(from).unwrap(), &expected[..from.iter().len()]);
    });
}

#[test]
fn a_started_message_beyond_an_open_edge_ends_and_returns_its_memory() {
    run(3, |communicator| {
        let mut mesh = Mesh::new(communicator.fork().unwrap(), [("x", 3)]).unwrap();
        let (own, Shift { from, to }) = (vec![mesh.rank() as u64], mesh.shift("x", 1).unwrap());
        let comm = mesh.communicator();
        let expected = [from.map_or(NOTHING, |from| from as u64)];
        let sent = comm.start_send(own.clone(), to);
        let received = comm.start_recv(vec![NOTHING], from);
        assert_eq!((&*sent.wait().unwrap(), &*received.wait().unwrap()), (&own[..], &expected[..]));
        let both = comm.start_send_recv(own.clone(), to, vec![NOTHING], from).wait().unwrap();
        assert_eq!((&*both.0, &*both.1), (&own[..], &expected[..]));
        let sent = comm.start_send(own.clone(), to);
        assert_eq!(comm.start_recv_vec::<u64>(from).wait().unwrap(), &expected[..from.iter().len()]);
        sent.wait().unwrap();
        let messages = vec![
            OwnedMessage::receive(from, vec![NOTHING]),
            OwnedMessage::send(to, own.clone()),
            OwnedMessage::send(None, vec![7]),
        ];
        let messages = comm.start_batch(messages).wait().unwrap().into_iter();
        let memories: Vec<_> = messages.map(|message| message.into_elements().into_vec()).collect();
        assert_eq!(memories, [expected.to_vec(), own, vec![7]]);
    });
}

#[test]
fn a_part_of_a_mesh_keeps_its_periodic_axes() {
    run(6, |communicator| {
        let mesh = Mesh::new(communicator.fork().unwrap(), [("x", 2), ("y", 3)]).unwrap();
        let mut mesh = mesh.with_periodic(["y"]).unwrap();
        let part = mesh.sub_mesh(["y"]).unwrap();
        let rank = part.rank();
        assert_eq!(
            part.shift("y", 1).unwrap(),
            Shift { from: Some((rank + 2) % 3), to: Some((rank + 1) % 3) }
        );
        assert_eq!(part.shift("y", -4).unwrap().to, Some((rank + 2) % 3));
        assert!(matches!(mesh.shift("z", 1), Err(Error::UnknownAxis { .. })));
        assert!(matches!(mesh.with_periodic(["z"]), Err(Error::UnknownAxis { .. })));
    });
}
