from tests.train.pictures import no_pictures, pictures

__all__ = ["no_pictures", "pictures"]
