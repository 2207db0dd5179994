//! The encoding: every kind of value comes back, sequences of numbers are packed, and no input makes it panic.

use std::collections::BTreeMap;
use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde::de::IgnoredAny;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserialize, Serialize, Serializer};

use super::decode::{DEPTH_MAX, decode};
use super::encode::encode;

#[track_caller]
fn comes_back<V: Serialize + DeserializeOwned + PartialEq + Debug>(value: &V) -> Vec<u8> {
    let bytes = encode(value, Vec::new()).expect("it can be encoded");
    assert_eq!(decode::<V>(&bytes).as_ref(), Ok(value));
    decode::<IgnoredAny>(&bytes).expect("any reader can pass over it");
    bytes
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Metres(f64);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Nothing;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Figure {
    Point,
    Circle(f32),
    Corners(i16, i16, i16, i16, i16),
    Named { name: String, sides: Vec<f64>, inside: Option<Box<Self>> },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Loose {
    Whole(i64),
    Real(f64),
    Text(String),
    List(Vec<Self>),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Flattened {
    id: u8,
    #[serde(flatten)]
    rest: BTreeMap<String, Loose>,
}

#[test]
fn every_kind_of_value_comes_back() {
    comes_back(&(true, 'ß', "text".to_owned(), (), Nothing));
    comes_back(&(i8::MIN, i16::MIN, i32::MIN, i64::MIN, i128::MIN));
    comes_back(&(u8::MAX, u16::MAX, u32::MAX, u64::MAX, u128::MAX));
    comes_back(&[i64::from(i8::MIN), -33, -32, -1, 0, 127, 128, 65_536, i64::MAX].map(Some));
    comes_back(&vec![Some(1.5_f32), None, Some(f32::INFINITY)]);
    comes_back(&BTreeMap::from([(vec![1_u8, 2, 3, 4, 5], Some("x".repeat(70_000))), (vec![], None)]));
    comes_back(&(0..70_000_i32).map(|n| n.to_string()).collect::<Vec<_>>());
    comes_back(&(0..70_000_u32).map(|n| (n, u64::from(n) << 30)).collect::<BTreeMap<_, _>>());
    let circle = Some(Box::new(Figure::Circle(-0.5)));
    let named = Figure::Named { name: String::new(), sides: vec![0.25; 9], inside: circle };
    comes_back(&[Figure::Point, Figure::Corners(1, 2, 3, 4, -5), named]);
    let loose = |n: i64| Loose::List(vec![Loose::Whole(n), Loose::Real(0.5), Loose::Text("t".to_owned())]);
    let rest = BTreeMap::from([
        ("a".to_owned(), loose(1)),
        ("b".to_owned(), Loose::List(vec![Loose::Whole(-1); 5])),
    ]);
    comes_back(&Flattened { id: 200, rest });
}

#[test]
fn numbers_of_one_type_are_sent_as_their_bytes() {
    fn is_packed<N: Serialize + DeserializeOwned + PartialEq + Debug>(numbers: &Vec<N>) {
        let bytes = comes_back(numbers);
        assert!(bytes.len() <= size_of_val(&**numbers) + 6, "{} bytes", bytes.len());
    }
    is_packed(&vec![i8::MIN; 1000]);
    is_packed(&vec![i16::MIN; 1000]);
    is_packed(&vec![i32::MIN; 1000]);
    is_packed(&vec![i64::MIN; 1000]);
    is_packed(&vec![u8::MAX; 1000]);
    is_packed(&vec![u16::MAX; 1000]);
    is_packed(&vec![u32::MAX; 70_000]);
    is_packed(&vec![u64::MAX; 1000]);
    is_packed(&vec![0.1_f32; 1000]);
    is_packed(&(0..100_000).map(|n| f64::from(n) * 0.1).collect());
    is_packed(&vec![Metres(0.1); 1000]);
    assert_eq!(comes_back(&vec![[0.5_f64; 32]; 3]).len(), 3 * 260 + 1);
    let nested = Figure::Named { name: "n".to_owned(), sides: vec![0.1; 1000], inside: None };
    assert!(comes_back(&nested).len() < 8000 + 50);
}

#[test]
fn a_sequence_with_other_elements_is_not_packed_and_comes_back() {
    let mut loose = vec![Loose::Real(0.5); 10];
    loose[7] = Loose::Whole(-3);
    comes_back(&loose);
    loose[3] = Loose::List(loose.clone());
    comes_back(&loose);
    for missing in [0, 5, 9] {
        let mut numbers = vec![Some(7_u64); 10];
        numbers[missing] = None;
        comes_back(&numbers);
    }
    comes_back(&vec![Some(7_u64); 10]);
    comes_back(&(1_u8, 2_u8, 3_u8, 4_u8, "five".to_owned()));
    comes_back(&(1_u8, 2_u16, 3_u32, 4_u64, -5_i8, 0.5_f32, 0.25_f64));
}

/// Writes a sequence and a map, and announces these lengths.
struct Announced(Option<usize>);

impl Serialize for Announced {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut outer = serializer.serialize_map(self.0)?;
        for key in 0..5 {
            outer.serialize_entry(&key, &InnerSequence(self.0))?;
        }
        outer.end()
    }
}

struct InnerSequence(Option<usize>);

impl Serialize for InnerSequence {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut inner = serializer.serialize_seq(self.0)?;
        for number in 0..5_u32 {
            inner.serialize_element(&number)?;
        }
        inner.end()
    }
}

#[test]
fn lengths_need_not_be_known_and_wrong_ones_are_refused() {
    for right in [None, Some(5)] {
        let decoded: BTreeMap<u8, Vec<u32>> =
            decode(&encode(&Announced(right), Vec::new()).unwrap()).unwrap();
        assert_eq!(decoded, (0..5).map(|key| (key, vec![0, 1, 2, 3, 4])).collect());
    }
    for wrong in [0, 3, 4, 6, 100] {
        let error = encode(&Announced(Some(wrong)), Vec::new()).unwrap_err().to_string();
        assert_eq!(error, format!("{wrong} elements were announced and 5 written"));
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Level(Option<(Box<Self>,)>);

fn levels(count: usize) -> Level {
    (1..count).fold(Level(None), |inner, _| Level(Some((Box::new(inner),))))
}

#[test]
fn values_that_are_nested_too_deeply_are_refused() {
    comes_back(&levels(DEPTH_MAX));
    let error = decode::<Level>(&encode(&levels(DEPTH_MAX + 2), Vec::new()).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "values are nested in more than 256 levels");
    let brackets = vec![0x91; 1 << 20];
    decode::<IgnoredAny>(&brackets).unwrap_err();
}

#[test]
fn damaged_bytes_are_an_error_or_another_value() {
    type Value = (Figure, Flattened, Vec<u16>, Option<Metres>, BTreeMap<String, Vec<f64>>);
    let value: Value = (
        Figure::Named { name: "name".to_owned(), sides: vec![0.5; 5], inside: Some(Box::new(Figure::Point)) },
        Flattened {
            id: 1,
            rest: BTreeMap::from([("key".to_owned(), Loose::List(vec![Loose::Real(1.0); 6]))]),
        },
        vec![300; 20],
        Some(Metres(2.0)),
        BTreeMap::from([("k".to_owned(), vec![1.0; 4])]),
    );
    let bytes = comes_back(&value);
    for len in 0..bytes.len() {
        decode::<Value>(&bytes[..len]).expect_err("some bytes are missing");
    }
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..20_000 {
        let mut damaged = bytes.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..damaged.len());
            damaged[at] = random.u8(..);
        }
        // Neither panics nor allocates memory for lengths that are not there.
        drop(decode::<Value>(&damaged));
        drop(decode::<serde_json::Value>(&damaged));
    }
    assert_eq!(decode::<u8>(&[7, 7]).unwrap_err().to_string(), "1 bytes follow the value");
    assert_eq!(decode::<Vec<u16>>(&[0xd6, 5, 1]).unwrap_err().to_string(), "the bytes end within a value");
    let odd = decode::<Vec<u64>>(&[0xd5, 7, 1, 1]).unwrap_err();
    assert_eq!(odd.to_string(), "a packed sequence ends within a number");
    assert_eq!(
        decode::<Vec<u8>>(&[0xd5, 99, 1, 1]).unwrap_err().to_string(),
        "extension 99 is no sequence of numbers"
    );
    decode::<(u8, u8)>(&encode(&[1_u8; 5], Vec::new()).unwrap()).expect_err("three numbers are left");
}
