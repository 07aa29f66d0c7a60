"""What the Hugging Face hub's client raises, as an error that a user can act on."""

from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from zagora_jax.errors import UserError

# The first base of HfHubHTTPError is HTTPError of httpx, or of httpx2 in newer clients: what a connection that fails
# raises, which is no OSError.
HUB_ERRORS: tuple[type[BaseException], ...] = (HfHubHTTPError.__bases__[0], HFValidationError, OSError)
REFUSALS = (GatedRepoError, RepositoryNotFoundError)  # of a hub that was reached


def as_user_error(name: str, what: str, instead: str, error: BaseException) -> UserError:
    """Say what stands between the user and `name`.

    Args:
        name: OWNER/NAME.
        what: "model" or "data set".
        instead: what else can be named, such as "a local folder".
        error: one of HUB_ERRORS.
    """
    if isinstance(error, GatedRepoError):
        return UserError(
            f"{name}: access must be granted first. Accept the {what}'s terms on its page, then log in with "
            "`hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return UserError(
            f"{name}: is neither {instead} nor a {what} that the hub shows you. Check the spelling; a private {what} "
            "needs `hf auth login`"
        )
    reason = str(error).strip().splitlines()
    return UserError(
        f"{name}: is not {instead}, and the hub cannot be reached to download it "
        f"({reason[0] if reason else type(error).__name__}). Name {instead}, or try again where there is a network"
    )
