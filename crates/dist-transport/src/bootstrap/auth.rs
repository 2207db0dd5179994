//! The handshake that opens every connection: both sides prove that they know the job's key.
//!
//! It has three messages of fixed size: hello, challenge, proof. Each proof is an HMAC-SHA256 over the whole
//! handshake, both nonces and both roles, so that nothing can be replayed, reflected or used for another
//! purpose. A hello of another [`Version`] is answered by a refusal with this version, in place of a
//! challenge. This module does no input or output.
//!
//! Bytes after the handshake are not encrypted. An attacker who can read or change the traffic between two
//! hosts can read or change them, as with other libraries of this kind. Between hosts the job needs a network
//! that its users trust.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::{ChannelId, Error, Result, Version};

/// Bytes of the first message, from the side that connects.
pub(crate) const HELLO_BYTES: usize = 80;
/// Bytes of the answer.
pub(crate) const CHALLENGE_BYTES: usize = 64;
/// Bytes of the last message, from the side that connects.
pub(crate) const PROOF_BYTES: usize = 32;

const MAGIC: [u8; 8] = *b"dist job";
const SECRET_BYTES_MIN: usize = 16;
const SECRET_BYTES_MAX: u64 = 4096;

/// Returns the answer to a hello of another version.
pub(crate) fn refusal() -> [u8; CHALLENGE_BYTES] {
    refusal_of(Version::OURS)
}

/// Returns the version of a process that has sent this refusal. Returns `None` for a challenge.
pub(crate) fn refused_by(answer: &[u8; CHALLENGE_BYTES]) -> Option<Version> {
    version_in(answer).filter(|&version| refusal_of(version) == *answer)
}

/// Returns the version of a process that has sent this hello. Returns `None` if it is no hello of this
/// library.
pub(crate) fn greeted_by(hello: &[u8; HELLO_BYTES]) -> Option<Version> {
    version_in(hello)
}

fn refusal_of(version: Version) -> [u8; CHALLENGE_BYTES] {
    let mut answer = [0; CHALLENGE_BYTES];
    answer[..16].copy_from_slice(&beginning(version));
    answer
}

/// Returns the first bytes of hellos and refusals.
fn beginning(version: Version) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&version.major.to_le_bytes());
    bytes[12..].copy_from_slice(&version.minor.to_le_bytes());
    bytes
}

fn version_in(bytes: &[u8]) -> Option<Version> {
    bytes.starts_with(&MAGIC).then(|| Version { major: word(bytes, 8), minor: word(bytes, 12) })
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The secret that only the processes of a job know.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Creates a secret from at least 16 bytes, which should be hard to guess.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::parse("the given bytes", bytes)
    }

    /// Reads the secret from a file that only its owner can read, or from an open descriptor (`fd:N`).
    ///
    /// # Errors
    /// If the file cannot be read, others can read it, or it holds fewer than 16 bytes.
    pub fn from_file(path: &Path) -> Result<Self> {
        let origin = path.display().to_string();
        let failed = |reason, source| Error::Secret { origin: origin.clone(), reason, source };
        let descriptor = origin.strip_prefix("fd:").map(|number| format!("/dev/fd/{number}"));
        let unreadable = |e| failed("it cannot be read", Some(e));
        let file = File::open(descriptor.as_deref().map_or(path, Path::new)).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.permissions().mode();
        if descriptor.is_none() && mode & 0o077 != 0 {
            return Err(failed("others than its owner can read it: chmod 600", None));
        }
        let mut bytes = Vec::new();
        file.take(SECRET_BYTES_MAX).read_to_end(&mut bytes).map_err(unreadable)?;
        Self::parse(&origin, &bytes)
    }

    /// Generates a random secret, and the text from which [`from_file`](Self::from_file) reads it on the other
    /// ranks.
    ///
    /// # Errors
    /// If the system has no randomness left.
    pub fn generate() -> Result<(Self, String)> {
        let text: String = random_bytes()?.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((Self::from_bytes(text.as_bytes())?, text))
    }

    fn parse(origin: &str, bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.trim_ascii_end();
        if bytes.len() < SECRET_BYTES_MIN {
            let reason = "it has fewer than 16 bytes";
            return Err(Error::Secret { origin: origin.to_owned(), reason, source: None });
        }
        Ok(Self(Sha256::digest(bytes).into()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The key with which a job's connections are opened.
#[derive(Clone)]
pub(crate) struct Key {
    mac: Hmac<Sha256>,
    is_secret: bool,
}

impl Key {
    /// Derives the key of a job from its secret and its name. Without a secret, the key separates the jobs of
    /// one host, but admits every process that knows the name.
    pub(crate) fn new(secret: Option<&Secret>, job: &str) -> Self {
        let mut hash = Sha256::new();
        match secret {
            Some(secret) => hash.update([b"secret", &secret.0[..]].concat()),
            None => hash.update(b"no secret"),
        }
        hash.update(job.as_bytes());
        let mac = Hmac::new_from_slice(&hash.finalize()).expect("HMAC takes a key of any length");
        Self { mac, is_secret: secret.is_some() }
    }

    /// Returns `true` if the key was derived from a secret.
    pub(crate) fn is_secret(&self) -> bool {
        self.is_secret
    }

    fn mac(&self, role: &[u8; 6], hello: &[u8; HELLO_BYTES], nonce: &[u8; 32]) -> Hmac<Sha256> {
        self.mac.clone().chain_update(role).chain_update(hello).chain_update(nonce)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A rank's control connection to the coordinator.
    Control,
    /// Messages of one channel, over this one of the connections of a link.
    Data(ChannelId, Stripe),
    /// Messages of one channel, through shared memory.
    Memory(ChannelId),
    /// Mapping an arena of the other rank's heap.
    Arena(u32),
    /// Finding out whether the other side can be reached.
    Probe,
}

/// One of the connections of a link between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stripe {
    /// The number of the attempt of the connecting process to open the link.
    pub(crate) attempt: u32,
    /// The index of the connection.
    pub(crate) index: u16,
    /// The number of connections of the link.
    pub(crate) count: u16,
}

/// The two ends and the purpose of a connection. Ranks are numbered as in the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The number of restarts of the job.
    pub(crate) epoch: u32,
    /// The rank that connects.
    pub(crate) from: u32,
    /// The rank that it connects to.
    pub(crate) to: u32,
    /// The purpose of the connection.
    pub(crate) purpose: Purpose,
}

impl Identity {
    fn encode(&self, nonce: &[u8; 32]) -> [u8; HELLO_BYTES] {
        let (kind, channel) = match self.purpose {
            Purpose::Control => (0_u32, 0),
            Purpose::Data(channel, _) => (1, channel.get()),
            Purpose::Memory(channel) => (2, channel.get()),
            Purpose::Arena(number) => (3, u64::from(number)),
            Purpose::Probe => (4, 0),
        };
        let mut hello = [0; HELLO_BYTES];
        hello[..16].copy_from_slice(&beginning(Version::OURS));
        hello[16..20].copy_from_slice(&kind.to_le_bytes());
        hello[20..24].copy_from_slice(&self.epoch.to_le_bytes());
        hello[24..28].copy_from_slice(&self.from.to_le_bytes());
        hello[28..32].copy_from_slice(&self.to.to_le_bytes());
        hello[32..40].copy_from_slice(&channel.to_le_bytes());
        if let Purpose::Data(_, Stripe { attempt, index, count }) = self.purpose {
            hello[40..44].copy_from_slice(&attempt.to_le_bytes());
            hello[44..46].copy_from_slice(&index.to_le_bytes());
            hello[46..48].copy_from_slice(&count.to_le_bytes());
        }
        hello[48..].copy_from_slice(nonce);
        hello
    }

    fn decode(hello: &[u8; HELLO_BYTES]) -> Option<Self> {
        let word = |at| word(hello, at);
        let channel = u64::from(word(32)) | u64::from(word(36)) << 32;
        let purpose = match word(16) {
            0 => Purpose::Control,
            1 => {
                let [index_low, index_high, count_low, count_high] = word(44).to_le_bytes();
                let index = u16::from_le_bytes([index_low, index_high]);
                let count = u16::from_le_bytes([count_low, count_high]);
                let stripe = Stripe { attempt: word(40), index, count };
                Purpose::Data(ChannelId::from_number(channel), stripe)
            }
            2 => Purpose::Memory(ChannelId::from_number(channel)),
            3 => Purpose::Arena(word(32)),
            4 => Purpose::Probe,
            _ => return None,
        };
        let identity = Self { epoch: word(20), from: word(24), to: word(28), purpose };
        let nonce = hello[48..].try_into().expect("a hello ends in 32 bytes of nonce");
        (identity.encode(nonce) == *hello).then_some(identity)
    }
}

/// The side that connects.
#[derive(Debug)]
pub(crate) struct Initiator {
    key: Key,
    hello: [u8; HELLO_BYTES],
}

impl Initiator {
    /// Begins a handshake as the side that connects.
    ///
    /// # Errors
    /// If the system has no randomness left.
    pub(crate) fn new(key: Key, identity: Identity) -> Result<Self> {
        Ok(Self { key, hello: identity.encode(&random_bytes()?) })
    }

    /// Returns the first message.
    pub(crate) fn hello(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    /// Returns the last message, if the challenge proves that the other side knows the key.
    pub(crate) fn answer(&self, challenge: &[u8; CHALLENGE_BYTES]) -> Option<[u8; PROOF_BYTES]> {
        let (nonce, proof) = challenge.split_at(32);
        let nonce = nonce.try_into().expect("a challenge begins with 32 bytes of nonce");
        self.key.mac(b"server", &self.hello, nonce).verify_slice(proof).ok()?;
        Some(self.key.mac(b"client", &self.hello, nonce).finalize().into_bytes().into())
    }
}

/// The side that is connected to, after the first message.
#[derive(Debug)]
pub(crate) struct Responder {
    key: Key,
    identity: Identity,
    hello: [u8; HELLO_BYTES],
    nonce: [u8; 32],
}

impl Responder {
    /// Reads the first message. Returns `None` if it is no hello of this version.
    ///
    /// # Errors
    /// If the system has no randomness left.
    pub(crate) fn new(key: Key, hello: &[u8; HELLO_BYTES]) -> Result<Option<Self>> {
        let nonce = random_bytes()?;
        Ok(Identity::decode(hello).map(|identity| Self { key, identity, hello: *hello, nonce }))
    }

    /// Returns the identity that the other side claims. It is not proven before [`accepts`](Self::accepts)
    /// returns `true`.
    pub(crate) fn claim(&self) -> Identity {
        self.identity
    }

    /// Returns the answer to the first message.
    pub(crate) fn challenge(&self) -> [u8; CHALLENGE_BYTES] {
        let mut challenge = [0; CHALLENGE_BYTES];
        let proof = self.key.mac(b"server", &self.hello, &self.nonce).finalize().into_bytes();
        challenge[..32].copy_from_slice(&self.nonce);
        challenge[32..].copy_from_slice(&proof);
        challenge
    }

    /// Returns `true` if the last message proves that the other side knows the key. The comparison takes
    /// constant time.
    pub(crate) fn accepts(&self, proof: &[u8; PROOF_BYTES]) -> bool {
        self.key.mac(b"client", &self.hello, &self.nonce).verify_slice(proof).is_ok()
    }
}

/// Returns bytes from the system's secure random generator.
pub(crate) fn random_bytes() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::Resources { what: "random number", source: io::Error::from(e) })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn key(text: &[u8]) -> Key {
        Key::new(Some(&Secret::from_bytes(text).unwrap()), "job")
    }

    fn identity() -> Identity {
        let stripe = Stripe { attempt: 0x0102_0304, index: 258, count: 515 };
        let purpose = Purpose::Data(ChannelId::WORLD.child(7, &[1, 2]), stripe);
        Identity { epoch: 3, from: 1, to: 2, purpose }
    }

    fn open(initiator: &Initiator, responder: &Responder) -> bool {
        initiator.answer(&responder.challenge()).is_some_and(|proof| responder.accepts(&proof))
    }

    #[test]
    fn two_sides_with_one_key_believe_each_other() {
        let initiator = Initiator::new(key(b"0123456789abcdef"), identity()).unwrap();
        let responder =
            Responder::new(key(b"0123456789abcdef\n"), initiator.hello()).unwrap().expect("our hello");
        assert_eq!(responder.claim(), identity());
        assert!(open(&initiator, &responder));
    }

    #[test]
    fn another_secret_another_job_and_no_secret_are_refused_by_both_sides() {
        let ours = key(b"0123456789abcdef");
        let others = [
            key(b"0123456789abcdeF"),
            Key::new(Some(&Secret::from_bytes(b"0123456789abcdef").unwrap()), "another"),
            Key::new(None, "job"),
        ];
        for other in others {
            let initiator = Initiator::new(other.clone(), identity()).unwrap();
            let responder = Responder::new(ours.clone(), initiator.hello()).unwrap().unwrap();
            assert_eq!(initiator.answer(&responder.challenge()), None);
            let theirs = Responder { key: other, nonce: responder.nonce, ..responder };
            let proof = initiator.answer(&theirs.challenge()).unwrap();
            assert!(!Responder { key: ours.clone(), ..theirs }.accepts(&proof));
        }
    }

    #[test]
    fn a_conversation_cannot_be_replayed_reflected_or_altered() {
        let key = key(b"0123456789abcdef");
        let initiator = Initiator::new(key.clone(), identity()).unwrap();
        let responder = Responder::new(key.clone(), initiator.hello()).unwrap().unwrap();
        let challenge = responder.challenge();
        let proof = initiator.answer(&challenge).unwrap();
        let again = Responder::new(key.clone(), initiator.hello()).unwrap().unwrap();
        assert!(!again.accepts(&proof), "an old proof opens nothing");
        let reflected: [u8; PROOF_BYTES] = challenge[32..].try_into().unwrap();
        assert!(!responder.accepts(&reflected), "the server's own proof opens nothing");
        let elsewhere = Initiator::new(key, Identity { to: 3, ..identity() }).unwrap();
        assert_eq!(elsewhere.answer(&challenge), None, "a challenge is for one hello");
    }

    #[test]
    fn a_secret_is_read_only_from_a_private_file_and_never_printed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let (secret, text) = Secret::generate().unwrap();
        fs::write(&path, text + "\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(Secret::from_file(&path), Err(Error::Secret { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(Secret::from_file(&path).unwrap(), secret);
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        fs::write(&path, "short").unwrap();
        assert!(matches!(Secret::from_file(&path), Err(Error::Secret { .. })));
        assert!(matches!(Secret::from_file(&dir.path().join("none")), Err(Error::Secret { .. })));
    }

    #[test]
    fn a_hello_of_another_version_is_rejected() {
        let mut hello = *Initiator::new(key(b"0123456789abcdef"), identity()).unwrap().hello();
        assert_eq!(greeted_by(&hello), Some(Version::OURS));
        hello[12] += 1;
        let theirs = Version { minor: Version::OURS.minor + 1, ..Version::OURS };
        assert_eq!(greeted_by(&hello), Some(theirs));
        assert!(Responder::new(key(b"0123456789abcdef"), &hello).unwrap().is_none());
        assert_eq!(refused_by(&refusal_of(theirs)), Some(theirs));
        hello[0] = b'D';
        assert_eq!(greeted_by(&hello), None);
    }

    #[test]
    fn a_challenge_is_no_refusal() {
        let initiator = Initiator::new(key(b"0123456789abcdef"), identity()).unwrap();
        let responder = Responder::new(key(b"0123456789abcdef"), initiator.hello()).unwrap().unwrap();
        let mut challenge = responder.challenge();
        assert_eq!(refused_by(&challenge), None);
        challenge[..16].copy_from_slice(&beginning(Version::OURS));
        assert_eq!(refused_by(&challenge), None, "though it begins like one by chance");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_hello_of_ours_or_refused(bytes in prop::array::uniform32(any::<u8>())) {
            let mut hello = *Initiator::new(key(b"0123456789abcdef"), identity()).unwrap().hello();
            hello[16..48].copy_from_slice(&bytes);
            if let Some(identity) = Identity::decode(&hello) {
                let nonce = hello[48..].try_into().unwrap();
                prop_assert_eq!(identity.encode(nonce), hello);
            }
        }
    }
}
